"""Every operation of one file on the command line: its help, each of its implementations, and its study."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from numdev.cli.build import located
from numdev.cli.compose import Composer
from numdev.measurement.invariance import Invariances
from numdev.measurement.runner import Runner
from numdev.operations import logprob, matmul, rmsnorm, router, scan
from numdev.results.record import Status
from numdev.results.store import Store
from numdev.settings import declared
from numdev.sources import config_folder
from tests.cli.commands import Command

SMALL = {
    "logprob": ("problem.tokens=4", "problem.vocabulary=64", "problem.hidden=16"),
    "matmul": ("problem.m=4", "problem.n=4", "problem.k=64"),
    "rmsnorm": ("problem.rows=4", "problem.hidden=64"),
    "scan": ("problem.heads=1", "problem.n=20", "problem.key=8", "problem.value=8"),
    "router": ("problem.tokens=8", "problem.experts=8", "problem.k=2", "problem.hidden=32"),
}
TOY: dict[str, dict[str, Any]] = {  # shorter axes, and what else makes the studies small
    "logprob": {"problem.tokens": 4, "problem.hidden": 16, "axes": {"problem.vocabulary": [64, 256]}},
    "matmul": {"problem.m": 2, "problem.n": 2, "axes": {"problem.k": [512, 8192]}},
    "rmsnorm": {"problem.rows": 8, "axes": {"problem.hidden": [64, 128]}},
    "scan": {"problem.heads": 1, "problem.key": 8, "problem.value": 8, "axes": {"problem.n": [16, 80]}},
    "router": {"problem.tokens": 64, "axes": {}},
}


NAMES = [name if name == "router" else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]


def test_none_is_left_out() -> None:
    folder = config_folder().parent / "numdev" / "operations"
    assert {path.stem for path in folder.glob("*.py")} == {*SMALL, "__init__", "base"}
    assert all(len(path.read_text().splitlines()) <= 350 for path in folder.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_help_names_every_setting(name: str, numdev: Command) -> None:
    ran, own = numdev("measure", f"operation={name}", "--help"), Composer((config_folder(),), operation=name)
    values = own.values()
    for group in ("problem", "precision", name):
        names = [f"{group}.{one.name}=" for one in declared(located(values[f"{group}._target_"]))]
        assert names or group == name
        assert [each for each in names if each not in ran.out] == []
    assert all(f"== {name}={option} ==" in ran.out for option in own.options(name))


@pytest.mark.parametrize("name", NAMES)
def test_each_implementation_is_measured_or_refused(name: str, numdev: Command, device: str) -> None:
    own = Composer((config_folder(),), operation=name)
    statuses = set[Status]()
    for option in own.options(name):
        stated = ("precision=fp32",) if "precision" in own.load(f"{name}/{option}") else ()
        ran = numdev("measure", f"operation={name}", f"{name}={option}", *SMALL[name], *stated, "seeds=1", f"device={device}")
        assert ran.code in (0, 3), ran.err
        statuses |= {record.status for record in Store(Path("results")).records()}
    assert statuses <= {Status.OK, Status.UNSUPPORTED}


STEPS: dict[str, tuple[Any, Any, Callable[[Any], list[Any]], Any]] = {  # of small problems, emulations that read every step
    "logprob": (logprob.LOGPROB, logprob.Problem(3, 40, 8), lambda policy: [logprob.Blocked(policy, 8)], logprob.Policy),
    "matmul": (matmul.MATMUL, matmul.Problem(3, 4, 40), lambda policy: [matmul.SplitK(policy, 3)], matmul.Policy),
    "rmsnorm": (rmsnorm.RMSNORM, rmsnorm.Problem(3, 40), lambda policy: [rmsnorm.Blocked(policy, 8)], rmsnorm.Policy),
    "router": (router.ROUTER, router.Problem(30, 16, 4, 20), lambda policy: [router.Routed(policy)], router.Policy),
    "scan": (scan.SCAN, scan.Problem(1, 20, 4, 4), lambda policy: [scan.Recurrent(policy), scan.Chunked(policy, 8)], scan.Policy),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_step_of_a_policy_is_read_and_named(name: str) -> None:
    """One step alone in a format of 3 bits moves an output beyond the error of FP64."""
    operation, problem, make, policy = STEPS[name]
    assert operation.steps == tuple(policy.golden().steps())
    drawn = operation.draw(problem, 0, torch.device("cpu"))
    golden = operation.exact(*drawn, **problem.arguments()).tensors()
    for step in operation.steps:
        changed = []
        for variant in make(policy.golden().with_step(**{step: "e11m2"})):
            outputs = variant(*variant.round_inputs(*drawn), **problem.arguments()).tensors()
            changed += [float((x - golden[output]).abs().max()) > 1e-6 for output, x in outputs.items()]
        assert any(changed), step


@pytest.mark.parametrize("name", STEPS)
def test_rows_of_the_emulation_do_not_depend_on_those_beside_them(name: str) -> None:
    """By construction: products and sums of one fixed shape (`numdev.arithmetic.products`); dw of logprob has no rows."""
    operation, problem, make, policy = STEPS[name]
    assert set(operation.rows) <= {*operation.output_names, *(each for inputs in operation.inputs for each in inputs.names)}
    problem = replace(problem, heads=3) if name == "scan" else problem
    for preset in ("kernel_bf16", "fp32"):
        for variant in make(policy.parse(preset)):
            record = Runner(Invariances(operation), "cpu").measure(problem, variant, None, 1)
            assert record.status is Status.OK, record.reason
            assert {row["equal_share"] for row in record.rows} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOY)
def test_its_study_has_a_verdict_on_every_claim_and_a_figure(name: str, numdev: Command) -> None:
    study: dict[str, Any] = yaml.safe_load((config_folder() / "study" / f"{name}.yaml").read_text())
    claims = [{field: value for field, value in claim.items() if field != "name"} for claim in study["claims"]]
    base = {key: value for key, value in TOY[name].items() if key != "axes"}
    toy = study | {"claims": claims, "base": study["base"] | base | {"seeds": 3}, "axes": study["axes"] | TOY[name]["axes"]}
    Path("mine/study").mkdir(parents=True)
    Path("mine/study/toy.yaml").write_text(yaml.safe_dump(toy | {"place": 999}, sort_keys=False))
    ran = numdev("measure", "--config-dir", "mine", "study=toy", "device=cpu", "workers=1")
    assert ran.code == 0, ran.err
    ran = numdev("report", "results=results", "out=out", "format=csv")
    assert ran.code == 0, ran.err
    with Path("out/claims.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["text"] for row in rows} == {claim["claim"] for claim in claims}
    assert {row["verdict"] for row in rows} <= {"holds", "fails", "undecided"}, [row["found"] for row in rows]
    assert list(Path("out/figures").glob("*.svg"))
