"""The studies of the backward pass at toy size, for tests of the report."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.differentiable import Backward
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.emulation import gradients_emulation_of
from numdev.attention.exact import RoundedBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.softmax import DeltaForm, OutputForDelta, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.attention.vendor.flex import FlexBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.measurement.deviation.measurement import Deviations
from numdev.measurement.runner import Runner
from numdev.results.manifest import EntryRole, Role, Scenario
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint, run

SEEDS = 4
STUDIES = ("gradients", "delta", "attribution", "validate_backward", "attribution_forward")
"""Of the chapters whose figures are tested on these."""


def variant(name: str, bc: int = 16, /, **steps: str) -> TiledBackward:
    """Both passes under one preset, with some steps of the backward pass changed."""
    tiling = Tiling(br=16, bc=bc)
    forward = Tiled(Precision.parse(name), tiling, count=False)
    return TiledBackward(forward, BackwardPrecision.parse(name).with_step(**steps), tiling, count=False)


def problem(kind: Kind, n: int) -> Problem:
    return Problem(Distribution(kind), Shape(queries=n, keys=n, head_dim=16, heads=2))


def gradients() -> Study:
    """Figures 3 to 6 asked of the gradients."""
    scenarios = {
        "uniform": (Kind.UNIFORM, "", Role.ASSUMED, "toy uniform inputs"),
        "normal": (Kind.NORMAL, "", Role.BEYOND, "toy normal inputs"),
        "kernel": (Kind.NORMAL, "kernel_", Role.BEYOND, "toy normal inputs, FP32 inside"),
    }
    points = [
        StudyPoint(problem(kind, n), variant(f"{preset}{fmt}", bc), None, SEEDS, name, labels)
        for name, (kind, preset, _, _) in scenarios.items()
        for fmt in ("bf16", "fp16", "fp32", "fp64")
        for n in (32, 64)
        for bc in (8, 16)
        for labels in ({"precision": fmt, "problem.n": n, "tiling.bc": bc},)
    ]
    stated = tuple(Scenario(name, title, role) for name, (_, _, role, title) in scenarios.items())
    claims = ("gradients", "gradients_formats", "gradients_tiles", "gradients_direction")
    return Study("gradients", "The gradients", "gradients", claims, tuple(points), scenarios=stated)


def store(path: Path, *studies: Study) -> Store:
    """A store with some studies, measured."""
    made, bench = Store(path), Runner(Deviations(ATTENTION_BACKWARD), "cpu")
    for study in studies:
        outcome = run(study, bench, made)
        assert not outcome.has_errors, outcome.failures
    return made


def delta() -> Study:
    """The two forms of delta, tied and untied maxima, O rounded or not, accumulated in BF16 or in FP32."""
    tiling = Tiling(br=16, bc=16)
    scenarios = {"tied": (Kind.TIED, Role.ASSUMED, "toy tied maxima"), "normal": (Kind.NORMAL, Role.CONTROL, "toy normal inputs")}
    forwards = {"kernel": ("kernel_bf16", BF16), "eager": ("eager_bf16", BF16), "fp32": ("fp32", FP32)}
    ways = {
        "O": Recompute(),
        "O unrounded": Recompute(output=OutputForDelta.UNROUNDED),
        "P": Recompute(delta=DeltaForm.PROBABILITIES),
    }
    points = [
        StudyPoint(
            problem(kind, 64),
            TiledBackward(Tiled(Precision.parse(name), tiling), BackwardPrecision.kernel(fmt), tiling, recompute, count=False),
            None,
            SEEDS,
            scenario,
            {"forward": forward, "delta": way},
            roles={"forward": EntryRole.CONTROL} if forward == "fp32" else {},
        )
        for scenario, (kind, _, _) in scenarios.items()
        for forward, (name, fmt) in forwards.items()
        for way, recompute in ways.items()
    ]
    stated = tuple(Scenario(name, title, role) for name, (_, role, title) in scenarios.items())
    claims = ("delta", "delta_fp32", "delta_forms")
    return Study("delta", "The bias of delta", "delta", claims, tuple(points), scenarios=stated)


def attribution() -> Study:
    """Each step of the backward pass alone in BF16, and alone in FP32."""
    points, stated = [], []
    steps = [field.name for field in fields(BackwardPrecision)]
    for kind, inputs in ((Kind.NORMAL, "toy normal inputs"), (Kind.UNIFORM, "toy uniform inputs")):
        for low, high in (("fp32", "bf16"), ("bf16", "fp32")):
            name = f"{kind.value}_{low}"
            stated.append(Scenario(name, f"{inputs}, from {low}, each step alone in {high}"))
            entries = {"none": (variant(low), EntryRole.CONTROL), "all": (variant(high), EntryRole.EXPECTED)}
            entries |= {step: (variant(low, 16, **{step: high}), EntryRole.SUBJECT) for step in steps}
            for entry, (made, role) in entries.items():
                roles = {} if role is EntryRole.SUBJECT else {"step": role}
                same = replace(made, forward=Tiled(Precision.parse("fp32"), made.tiling))
                points.append(StudyPoint(problem(kind, 32), same, None, SEEDS, name, {"step": entry}, roles=roles))
    claims = ("attribution", "attribution_step")
    return Study("attribution", "Which step", "attribution", claims, tuple(points), scenarios=tuple(stated))


def validate_backward() -> Study:
    """What has gradients without a GPU: PyTorch's flash kernel, and exact ones rounded once; and kernels that have none here."""
    walked: dict[str, tuple[Backward, int | None]] = {
        "exact_rounded": (RoundedBackward(), 16),
        "sdpa_flash": (SdpaBackward(Backend.FLASH), None),
        "sdpa_cudnn": (SdpaBackward(Backend.CUDNN), 16),
        "flex": (FlexBackward(), 16),
    }
    points = []
    for scenario, kind in (("uniform", Kind.UNIFORM), ("normal", Kind.NORMAL)):
        given = Problem(Distribution(kind), Shape(queries=64, keys=64, head_dim=16, heads=2, kv_heads=2))
        for name, (measured, side) in walked.items():
            own = None if name == "exact_rounded" else measured.forward_pass
            order = None if side is None else Order.FORWARD
            baseline = gradients_emulation_of(measured, given.shape, given.mask, side, side, order, order, own)
            roles = {"kernel": EntryRole.CONTROL} if name == "exact_rounded" else {}
            points.append(StudyPoint(given, measured, baseline, SEEDS, scenario, {"kernel": name}, roles=roles))
    stated = (Scenario("uniform", "toy uniform inputs", Role.ASSUMED), Scenario("normal", "toy normal inputs", Role.BEYOND))
    claims = ("validate_backward",)
    return Study("validate_backward", "Gradients of kernels", "validate_backward", claims, tuple(points), scenarios=stated)
