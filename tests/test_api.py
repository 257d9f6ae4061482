"""One call, and the names that the package offers without importing torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import FunctionType

import pytest

import numdev as nd
from numdev import api
from numdev.arithmetic.formats import BF16, E4M3FN, FP32, FP64, TF32, Format
from numdev.attention.emulation import baseline_for

OFFERED: list[str] = importlib.import_module("numdev").__all__
HEAVY = ("torch", "pandas", "matplotlib", "scipy", "hydra", "numpy", "jaxtyping", "safetensors")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_waits_for_everything_heavy() -> None:
    loaded = python(
        f"import sys, numdev; numdev.__version__; hasattr(numdev, '__path__'); print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert loaded == "[]"


def test_names_in_a_fresh_process() -> None:
    """Every public name is found, and neither plotting nor the command line is imported for it."""
    code = (
        "import sys, numdev as nd; one = nd.measure; from numdev.api import Bench;"
        "assert nd.measure is one and callable(one) and nd.Bench is Bench;"
        "assert set(nd.__all__) <= set(dir(nd));"
        "print([m for m in ('pandas', 'matplotlib', 'scipy', 'hydra', 'triton') if m in sys.modules])"
    )
    assert python(code) == "[]"


def test_star_import_in_a_fresh_process() -> None:
    assert python("from numdev import *; print(measure.__name__, Tiled.__name__, Kind.UNIFORM.value)") == "measure Tiled uniform"


def test_star_import_waits_for_nothing_that_few_names_need() -> None:
    late = ("pandas", "matplotlib", "scipy", "hydra", "triton", "psutil", "pyarrow", "safetensors")
    assert python(f"import sys; from numdev import *; print([m for m in {late} if m in sys.modules])") == "[]"


def test_every_public_name_is_there() -> None:
    assert sorted(OFFERED) == OFFERED
    assert len(set(OFFERED)) == len(OFFERED)
    for name in OFFERED:
        assert getattr(nd, name).__module__.startswith("numdev."), name
    assert set(OFFERED) <= set(dir(nd))
    assert isinstance(nd.measure, FunctionType)


@pytest.mark.parametrize("name", ["absent", "_private", "BF16", "lru_cache", "__wrapped__"])
def test_other_names_are_not(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^No numdev attribute {name}$"):
        getattr(nd, name)
    assert name not in dir(nd)


PROBLEM = nd.Problem(nd.Distribution(nd.Kind.NORMAL), nd.Shape(queries=16, keys=24, head_dim=8))
VARIANT = nd.Tiled(nd.Precision.kernel(BF16), nd.Tiling(br=8, bc=8))


@pytest.mark.parametrize(("fmt", "expected"), [(BF16, BF16), (FP64, FP64), (TF32, TF32), (E4M3FN, FP32), (Format(5, 2), FP32)])
def test_the_baseline_is_torchs_operations_in_the_output_format(fmt: Format, expected: Format) -> None:
    assert baseline_for(fmt) == nd.Naive(nd.Precision.eager(expected))


def test_measure() -> None:
    record = nd.measure(PROBLEM, VARIANT, seeds=3, device="cpu")
    assert record.status is nd.Status.OK
    assert record.config["seeds"] == 3
    found = {(row["seed"], row["subject"], row["output"], row["reference"]) for row in record.rows}
    compared = [("variant", r) for r in ("golden", "golden_same_inputs", "baseline")]
    compared += [("baseline", r) for r in ("golden", "golden_same_inputs")]
    assert found == {(seed, subject, out, r) for seed in range(3) for subject, r in compared for out in ("out", "lse")}
    assert len(record.rows) == len(found)
    assert set(nd.Deviation.__dataclass_fields__) <= set(record.rows[0])


def test_measure_takes_the_baseline_of_the_output_format() -> None:
    assert nd.measure(PROBLEM, VARIANT, seeds=1, device="cpu").rows == (
        nd.measure(PROBLEM, VARIANT, nd.Naive(nd.Precision.eager(BF16)), seeds=1, device="cpu").rows
    )
    other = nd.measure(PROBLEM, VARIANT, nd.Naive(nd.Precision.uniform(BF16)), seeds=1, device="cpu")
    assert other.key != nd.measure(PROBLEM, VARIANT, seeds=1, device="cpu").key
    assert other.config["baseline"]["precision"]["name"] == "bf16"


def test_ten_replicates_unless_told() -> None:
    tiny = nd.Problem(nd.Distribution(), nd.Shape(queries=2, keys=2, head_dim=2))
    assert {row["seed"] for row in nd.measure(tiny, nd.Exact(), device="cpu").rows} == set(range(10))


def test_bad_requests_are_raised() -> None:
    with pytest.raises(nd.BadInput, match="^device: "):
        nd.measure(PROBLEM, VARIANT, device="tpu")
    with pytest.raises(nd.BadInput, match="^seeds: 0 "):
        nd.measure(PROBLEM, VARIANT, seeds=0, device="cpu")


def test_the_bench_of_a_device_is_kept() -> None:
    assert api.bench("cpu") is api.bench("cpu")
    assert api.bench("cpu").kind.operation.golden == nd.Exact()


def test_a_value_that_cannot_have_an_effect_is_refused() -> None:
    policy = nd.Precision.parse("bf16")
    for variant, field in (
        (nd.Tiled(policy, nd.Tiling(16, 16, splits=100)), "tiling.splits"),
        (nd.Tiled(policy.with_step(row_sum="bf16@1000"), nd.Tiling(16, 16)), "precision.row_sum"),
        (nd.Tiled(policy, nd.Tiling(16, 32), nd.OnlineSoftmax(exp=nd.Exponential.parse("exp2_fa4"))), "softmax.exp"),
        (nd.Triton(bc=16, splits=100), "tiling.splits"),
    ):
        with pytest.raises(nd.BadInput, match=f"^{field}: .*; give "):
            nd.measure(PROBLEM, variant, seeds=1, device="cpu")
