"""Every study of the paper at toy size, for tests of the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numdev.api import Bench
from numdev.arithmetic.formats import FP16
from numdev.arithmetic.quantise import Scale
from numdev.arithmetic.rounding import Cast
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.emulation import baseline_for, emulation_of
from numdev.attention.exact import Exact
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.softmax import Normalise, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.results.manifest import EntryRole, Role, Scenario
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint, run

FORMATS = ("bf16", "fp16", "fp32", "fp64")


@dataclass(frozen=True)
class Size:
    """How large the toy is: tokens, the sweep of tokens, head_dim, the SRAM sizes in elements, seeds."""

    n: int = 64
    sweep: tuple[int, ...] = (32, 96)
    dim: int = 16
    sram: tuple[int, ...] = (1024, 4096)
    formats: tuple[str, ...] = ("bf16", "fp32")  # of Figures 5 and 6 in the scenarios that stand for the paper
    seeds: int = 3
    scenarios: tuple[str, ...] = ("normal_end", "uniform_end", "kernel_uniform")


def named(study: Study) -> Study:
    """With a title and a role for each scenario: uniform inputs and the methods of Table 3 are what we assume of the papers."""
    if study.scenarios:
        return study
    names = dict.fromkeys(point.scenario for point in study.points)
    roles = {name: Role.ASSUMED if name.startswith("uniform") else Role.BEYOND for name in names}
    return replace(study, scenarios=tuple(Scenario(name, title_of(name), role) for name, role in roles.items()))


def title_of(scenario: str) -> str:
    """What a reader sees of a scenario: never its name."""
    return f"toy {scenario.replace('_', ' ')} inputs{', FP32 inside' if scenario.startswith('kernel') else ''}"


def _problem(scenario: str, n: int, dim: int) -> Problem:
    kind = Kind.NORMAL if "normal" in scenario else Kind.UNIFORM
    return Problem(Distribution(kind), Shape(queries=n, keys=n, head_dim=dim))


def _point(scenario: str, fmt: str, tiling: Tiling, size: Size, labels: dict[str, Any], *, n: int | None = None) -> StudyPoint:
    name = f"kernel_{fmt}" if scenario.startswith("kernel_") else fmt
    softmax = OnlineSoftmax(Normalise.EACH if scenario.endswith("_each") else Normalise.END)
    variant = Tiled(Precision.parse(name), tiling, softmax)
    return StudyPoint(
        _problem(scenario, n or size.n, size.dim),
        variant,
        baseline_for(variant.format),
        size.seeds,
        scenario,
        {"precision": name} | labels,
    )


def _formats(scenario: str, size: Size) -> tuple[str, ...]:
    """BF16 alone in the scenarios beyond the paper."""
    return size.formats if scenario.startswith("uniform_") else size.formats[:1]


def by_format(name: str, size: Size) -> Study:
    """Figures 3 and 4."""
    tiling = Tiling(br=16, bc=16)
    points = [_point(s, f, tiling, size, {}) for s in size.scenarios for f in FORMATS]
    return Study(name, "Deviation over number formats", name, (name,), tuple(points))


def assumptions(size: Size) -> Study:
    """The ratio of Figure 4 over the lengths."""
    tiling = Tiling(br=16, bc=16)
    points = [_point(s, "bf16", tiling, size, {"problem.n": n}, n=n) for s in size.scenarios for n in size.sweep]
    return Study("fig4_assumptions", "Figure 4 over N", "fig4_assumptions", ("fig4_assumptions",), tuple(points))


def by_length(size: Size) -> Study:
    """Figures 5a and 5b, of one study."""
    tiling = Tiling(br=16, bc=16)
    points = [
        _point(s, f, tiling, size, {"problem.n": n}, n=n) for s in size.scenarios for f in _formats(s, size) for n in size.sweep
    ]
    return Study("fig5", "Deviation over sequence length", "fig5a", ("fig5a", "fig5b"), tuple(points))


def long(size: Size) -> Study:
    """Against golden alone, over the lengths."""
    tiling = Tiling(br=16, bc=16)
    points = [_point(s, "bf16", tiling, size, {"problem.n": n}, n=n) for s in size.scenarios for n in size.sweep]
    return Study("long", "Long sequences", "parting", ("long",), tuple(replace(point, baseline=None) for point in points))


def by_shape(name: str, others: tuple[str, ...], size: Size) -> Study:
    """Figures 6a and 6b: the paper's tile as it is, and swapped or square."""

    def points() -> Iterator[StudyPoint]:
        for scenario in size.scenarios:
            for fmt in _formats(scenario, size):
                for sram in size.sram:
                    tile = Tiling.from_sram(sram, size.dim)
                    keeping = Tiling(br=tile.bc, bc=tile.bc)
                    shapes = {"as_is": tile, "swapped": tile.swapped(), "square": tile.square(), "square_bc": keeping}
                    for shape in ("as_is", *others):
                        labels = {"tiling.sram": sram, "tiling.shape": shape}
                        yield _point(scenario, fmt, shapes[shape], size, labels)

    return Study(name, f"The tile as it is, and {', '.join(others)}".replace("_", " "), name, (name,), tuple(points()))


def by_area(size: Size) -> Study:
    """Figure 6c."""
    tiles = [Tiling.from_sram(sram, size.dim) for sram in size.sram]
    points = [
        _point(s, f, tile, size, {"tiling.bc": tile.bc, "tiling.br": tile.br})
        for s in size.scenarios
        for f in _formats(s, size)
        for tile in tiles
    ]
    return Study("fig6c", "Deviation over block area", "fig6c", ("fig6c",), tuple(points))


def fa3(size: Size) -> Study:
    """FlashAttention-3, Table 3."""
    problem = Problem(Distribution(Kind.OUTLIERS), Shape(queries=size.n, keys=size.n, head_dim=size.dim))
    tiling = Tiling(br=64, bc=64)
    fp8_naive = Precision.fp8(Scale.TENSOR, hadamard=False).with_step(output=Cast(FP16))
    methods: dict[str, Any] = {
        "FP16 baseline": Naive(Precision.eager(FP16)),
        "FP16 FlashAttention-2": Tiled(Precision.kernel(FP16), tiling),
        "FP16 FlashAttention-3": Tiled(Precision.kernel(FP16), replace(tiling, br=128, bc=128)),
        "FP8 baseline": Naive(fp8_naive),
        "FP8 FlashAttention-3": Tiled(Precision.fp8(), tiling),
        "FP8 FA3, no block quantisation": Tiled(Precision.fp8(Scale.TENSOR), tiling),
        "FP8 FA3, no incoherent processing": Tiled(Precision.fp8(hadamard=False), tiling),
    }
    named = {f"method_{place}": row for place, row in enumerate(methods)}
    points = [StudyPoint(problem, methods[row], None, size.seeds, scenario=name) for name, row in named.items()]
    scenarios = tuple(Scenario(name, title_of(name), Role.ASSUMED, row) for name, row in named.items())
    title = "RMSE of FlashAttention-3, Table 3"
    return Study("fa3_table3", title, "fa3_table3", ("fa3_table3",), tuple(points), scenarios=scenarios)


def sign(size: Size) -> Study:
    """The same inputs under both policies."""
    points = []
    for scenario in ("uniform", "normal"):
        for policy in ("uniform", "kernel"):
            base = _point(scenario, "bf16", Tiling(br=16, bc=16), size, {})
            variant = replace(base.variant, precision=Precision.parse(f"{policy}_bf16"))
            points.append(replace(base, variant=variant, labels={"precision": f"{policy}_bf16"}))
    return Study("sign", "Better or worse than the baseline", "sign", ("sign",), tuple(points))


def real_kernels(name: str, size: Size) -> Study:
    """What runs without a GPU: PyTorch's CPU kernels, ours interpreted, and one that cannot."""
    variants: dict[str, Any] = {
        "triton": Triton(br=16, bc=16, kernel=Kernel.PORTABLE),
        "sdpa_flash": Sdpa(Backend.FLASH),
        "sdpa_math": Sdpa(Backend.MATH),
        "flex": Flex(),
    }
    roles = {"exact_rounded": EntryRole.CONTROL}
    if name == "validate":
        variants |= {"exact_rounded": Custom("numdev.attention.exact:rounded_once")}
    if name == "kernels":
        tiling = Tiling(16, 16)
        variants = {n: Tiled(Precision.parse(n), tiling) for n in ("uniform_bf16", "kernel_bf16")} | variants
        roles = {"uniform_bf16": EntryRole.CONTROL, "kernel_bf16": EntryRole.EXPECTED, "sdpa_math": EntryRole.ASIDE}
    points = []
    for scenario in ("uniform", "normal"):
        problem = _problem(scenario, size.n, size.dim)
        for label, variant in variants.items():
            baseline = (
                emulation_of(variant, problem.shape, bc=16, order=Order.FORWARD)
                if name == "validate"
                else baseline_for(variant.format)
            )
            point = StudyPoint(problem, variant, baseline, size.seeds, scenario, {"kernel": label})
            points.append(replace(point, roles={"kernel": roles[label]} if label in roles else {}))
    return Study(name, "Real kernels", name, (name,), tuple(points))


def studies(size: Size) -> list[Study]:
    """Every study."""
    shapes = [by_shape("fig6a", ("swapped",), size), by_shape("fig6b", ("square", "square_bc"), size)]
    found = [
        by_format("fig3", size),
        by_format("fig4", size),
        assumptions(size),
        by_length(size),
        long(size),
        *shapes,
        by_area(size),
        fa3(size),
        sign(size),
        real_kernels("validate", size),
        real_kernels("kernels", size),
    ]
    return [named(study) for study in found]


def measure_all(path: Path, size: Size | None = None) -> Store:
    """A store with every study, measured."""
    store, bench = Store(path), Bench(Exact(), "cpu")
    for study in studies(size or Size()):
        outcome = run(study, bench, store)
        assert not outcome.has_errors, outcome.failures
    return store
