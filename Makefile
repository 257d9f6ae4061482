# `make paper` and `make training` run the main jobs, `make test` passes the tests; all set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
unexport PYTHONDONTWRITEBYTECODE # the tests start many processes, each of which would compile numdev

# The arithmetic, on the paths of the mathematics libraries that are least like those of a processor of today. Expectations depend on
# no path. Elementary functions and products are tested on one more.
NUMERICS := tests/arithmetic/test_elementary.py tests/arithmetic/test_rounded_once.py tests/arithmetic/test_rounding.py tests/arithmetic/test_quantise.py \
	$(addprefix tests/attention/test_,precision.py softmax.py counters.py exact.py naive.py tiled.py)

.PHONY: help setup paper training test shapes numerics slow lint types check bench faults kill docs docs-serve clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(READY) ## make .venv with numdev and its development tools

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"numdev needs Python 3.11 to 3.13, and {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

paper: $(READY) ## measure Figures 3 to 6 of the paper and write reports/paper
	$(BIN)/numdev paper $(ARGS)

training: $(READY) ## train the rungs of Figures 7 and 8 of the paper, small, and write reports/training
	OMP_NUM_THREADS=1 $(BIN)/numdev train -m study=fig7,fig8 task.batch=12 shard=0,1 shards=2 \
		hydra/launcher=joblib hydra.launcher.n_jobs=2 $(ARGS)

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not exhaustive" $(ARGS)

slow: $(READY) ## run the slower tests: documentation, notebooks, wheels, launchers, registers of compiled kernels
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow and not exhaustive" $(ARGS)

shapes: $(READY) ## run the tests of what computes, with types and shapes checked at each call
	$(BIN)/python -m pytest -n 2 --dist loadgroup --shapes -m "not slow and not exhaustive" \
		tests/arithmetic tests/attention tests/measurement tests/training

numerics: $(READY) ## run the tests of the arithmetic on other paths of the mathematics libraries
	OMP_WAIT_POLICY=passive ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(BIN)/python -m pytest -n 2 --threads 2 \
		-k "not expectation" $(NUMERICS)
	OMP_WAIT_POLICY=passive ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 $(BIN)/python -m pytest -n 2 --threads 2 \
		tests/arithmetic/test_elementary.py tests/attention/test_precision.py

lint: $(READY) ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## check types
	$(BIN)/mypy

check: lint types test slow shapes numerics ## style, types and all tests, those of the arithmetic on other paths of the libraries too

bench: $(READY) ## measure the speed of the instrument itself
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pychop>=0.6,<0.7'
	$(BIN)/python benchmarks/run.py $(ARGS)

faults: $(READY) ## show that seeded faults are caught by the tests
	$(BIN)/python experiments/seeded_faults.py

kill: $(READY) ## show that a study killed at random moments resumes to the same bytes
	$(BIN)/python experiments/kill_and_resume.py

docs: $(READY) ## build the documentation into site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(READY) ## show the documentation while it is written, at 127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean: ## remove what was built, not the results
	rm -rf $(VENV) dist build site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
