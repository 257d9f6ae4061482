"""Every study of the paper at toy size, for tests of the report: the files of numdev with fewer and smaller points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numdev.api import Bench
from numdev.attention.exact import Exact
from numdev.cli.compose import composer
from numdev.cli.expand import Expander
from numdev.measurement.studies import run
from numdev.results.record import Status
from numdev.results.store import Store
from numdev.results.study import Study
from numdev.sources import config_folder

EXPANDER = Expander(composer((config_folder(),)))
SCENARIOS = ("normal_end", "uniform_end", "kernel_uniform")
BASE: dict[str, Any] = {"problem.n": 64, "problem.head_dim": 16, "tiling.br": 16, "tiling.bc": 16, "seeds": 3}
FORMATS = ["bf16", "fp32"]  # in the scenario that stands for the paper; the others have BF16 alone
TILES: dict[str, Any] = {"tiling.br": None, "tiling.bc": None}  # which an axis of SRAM sizes gives
SRAM, LENGTHS = {"tiling.sram": [1024, 4096]}, {"problem.n": [32, 96]}
CPU: dict[str, Any] = {  # what runs without a GPU: PyTorch's CPU kernels, ours interpreted, and one that cannot
    "triton": {"attention": "triton", "attention.kernel": "portable", "softmax": "fa2", "tiling.br": 16, "tiling.bc": 16},
    "sdpa_flash": {"attention": "sdpa", "attention.backend": "flash"},
    "sdpa_math": {"attention": "sdpa", "attention.backend": "math"},
    "flex": {"attention": "flex"},
}


def toy(
    name: str,
    scenarios: Sequence[str] = SCENARIOS,
    axes: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
    file: str = "",
) -> Study:
    """A study of numdev with a smaller base, some of its scenarios, and shorter axes, also where a scenario has its own."""
    fields, axes = EXPANDER.composer.study(file or name), axes or {}
    kept = {}
    for scenario in scenarios:
        own = dict(fields["scenarios"][scenario])
        if "axes" in own:
            own["axes"] = {
                axis: axes.get(axis, values) if axis != "precision" else values for axis, values in own["axes"].items()
            }
        kept[scenario] = own
    smaller = {key: value for key, value in {**fields["base"], **BASE, **(base or {})}.items() if value is not None}
    parts = {"scenarios": kept, "base": smaller, "axes": {**fields["axes"], **axes}, "more": []}
    return EXPANDER.study(name, {**fields, **parts})


def title_of(scenario: str) -> str:
    """The title of a scenario of Figures 3 to 6."""
    return str(EXPANDER.composer.study("fig3")["scenarios"][scenario]["title"])


def validate() -> Study:
    """Two problems for kernels that run without a GPU, with the tile of their emulation."""
    own = EXPANDER.composer.study("validate")["axes"]["kernel"]
    emulated = {
        name: kernel if name == "triton" else {**kernel, "tiling.bc": 16, "tiling.order": "forward"}
        for name, kernel in CPU.items()
    }
    axes = {"kernel": {"exact_rounded": own["exact_rounded"], **emulated}, "precision": ["bf16"], "problem.causal": [False]}
    axes |= {"problem.head_dim": [16], "problem.n": [64]}
    return toy("validate", ("uniform", "normal"), axes, TILES | {"problem.heads": 1})


def kernels() -> Study:
    """The emulated policies beside kernels that run without a GPU."""
    own = EXPANDER.composer.study("kernels")["axes"]["kernel"]
    policies = {name: {**own[name], "tiling.br": 16, "tiling.bc": 16} for name in ("uniform_bf16", "kernel_bf16")}
    each = {name: {**CPU[name], "role": own.get(name, {}).get("role", "subject")} for name in ("sdpa_flash", "sdpa_math", "flex")}
    return toy("kernels", ("uniform", "normal"), {"kernel": {**policies, **each}}, TILES | {"problem.heads": 1})


def table3_kernel() -> Study:
    """Its methods in the order of their errors, by kernels that run without a GPU."""
    low: dict[str, Any] = {"precision": "e4m3fn"}
    methods = {"FP16": {"precision": "fp16"}, "FP8": low, "FP8, no incoherent processing": {**low, "tiling.bc": 32}}
    return toy("fa3_table3_kernel", (), {"method": methods}, {"attention.kernel": "portable", "problem.queries": 20})


def studies() -> list[Study]:
    """Every study."""
    by_setting: dict[str, Any] = {"precision": FORMATS}
    fig5 = toy("fig5", axes=by_setting | LENGTHS, file="fig5a")
    return [
        toy("fig3"),
        toy("fig4"),
        toy("fig4_assumptions", ("uniform", "normal"), LENGTHS),
        replace(fig5, claims=("fig5a", "fig5b")),
        toy("long", ("uniform", "normal", "kernel_uniform"), LENGTHS, {"attention": "tiled"}),
        *(toy(name, axes=by_setting | SRAM, base=TILES) for name in ("fig6a", "fig6b", "fig6c")),
        toy("fa3_table3", tuple(EXPANDER.composer.study("fa3_table3")["scenarios"]), base=TILES),
        table3_kernel(),
        toy(
            "fp8",
            ("normal",),
            {"problem.n": [128, 16384]},
            {"tiling.bc": 128, "problem.queries": 4, "problem.heads": 1, "problem.head_dim": 32},
        ),
        toy(
            "fp8_kernel",
            ("normal",),
            {"problem.n": [32, 64], "promotion": {"after a tile": {}, "never": {"tiling.bc": 32}}},
            {"attention.kernel": "portable", "tiling.br": 16, "tiling.bc": 16, "problem.queries": 20, "problem.head_dim": 16},
        ),
        toy("kv_cache", ("normal",), base={"problem.n": 64, "problem.heads": 2, "problem.head_dim": 32}),
        toy("sign", ("uniform", "normal"), {"precision": ["bf16", "kernel_bf16"]}),
        validate(),
        kernels(),
    ]


def measure_all(path: Path) -> Store:
    """A store with every study, measured."""
    store, bench = Store(path), Bench(Exact(), "cpu")
    for study in studies():
        outcome = run(study, bench, store)
        assert Status.ERROR not in outcome.statuses, outcome.failures
    return store
