"""The kind of measurement `certificate`: a kernel judged, how it is built, and how many bits of its output that predicts."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from numdev.attention.base import Attention, Backward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.attention.vendor.sdpa import Backend, SavingSdpa, Sdpa
from numdev.certification.accuracy import Verdict
from numdev.certification.certificate import certify
from numdev.errors import BadInput, Unsupported
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.results.record import Column, Use

_TILES = re.compile(r"tiles of (\d+) keys, (?:(forward|reverse)|(\d+) splits)(, lazy rescales)?")
_COLUMNS = (
    Column("seed", "", "the first seed", Use.PLACE),
    Column("verdict", "", "pass, limited, inconclusive or fail", Use.PLACE),
    Column("score", "relative", "permitted over measured RMSE, as the certificate has it", Use.CHIEF),
    Column("tiles", "", "size, order and splits of the tiles of keys, as the error of the kernel shows them", Use.PLACE),
    Column("equal", "relative", "share of out or dQ equal to the declared policy in these tiles, on the point's problem"),
    Column("computes", "", "what is nearest to the error of the kernel, and how much of it that explains", Use.PLACE),
    Column("fails", "", "inputs and probes on which the kernel fails", Use.PLACE),
)


@dataclass(frozen=True)
class Certificates(Kind):
    """Certifies kernels under the policy `kernel(F)` of their format, at the head_dim of the problem."""

    operation: Operation
    name: ClassVar[str] = "certificate"
    seeds: ClassVar[int] = 1

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        return {self.name: _COLUMNS}

    def config(self, point: Point) -> dict[str, Any]:
        """Raises BadInput for a baseline: a kernel is judged by what its policy permits."""
        if point.baseline is not None:
            raise BadInput("baseline", type(point.baseline).__name__, "a kernel is judged by its policy; give baseline=none")
        return super().config(point)

    def run(self, point: Point, context: Context) -> Findings:
        """One row for each first seed."""
        variant, problem, rows, kernel = point.variant, point.problem, list[dict[str, Any]](), ""
        if isinstance(variant, Sdpa) and variant.backend is not Backend.MATH:
            variant = SavingSdpa(variant.backend, variant.fmt)  # which returns the LSE too
        backward = variant if isinstance(variant, Backward) else None
        for seed in context.replicates():
            inputs = variant.round_inputs(*self.operation.draw(problem, seed, context.device))
            output = variant(*inputs, **problem.arguments())  # first: what it cannot run at all is refused with its reason
            certificate = certify(
                variant if backward is None else backward.forward,
                f"kernel_{variant.format}",
                backward=backward,
                device=context.device.type,
                seed=seed,
                head_dim=problem.shape.head_dim,
            )
            culprit, equal = certificate.culprit, math.nan
            computes = culprit.sentence(fails=False) if culprit else ""
            tiles = culprit.ranks[0].tiles if culprit and culprit.ranks else ""  # the nearest, also where they cannot be told
            fails = [case.name for case in certificate.cases if case.verdict is Verdict.FAIL]
            fails += [probe.name for probe in certificate.probes if probe.fails]
            with suppress(Unsupported):  # of gradients after a forward pass that returns no LSE
                if model := emulation(variant, tiles):
                    predicted = model(*(x.to(model.precision.carrier) for x in inputs), **problem.arguments()).tensors()
                    own = output.tensors()[self.operation.primary]
                    equal = float((predicted[self.operation.primary] == own.to(model.precision.carrier)).double().mean())
            values = seed, certificate.verdict.value, certificate.score, tiles, equal, computes, ", ".join(fails)
            rows.append({column.name: value for column, value in zip(_COLUMNS, values, strict=True)})
            kernel = output.kernel
        return Findings({self.name: rows}, kernel)


def emulation(variant: Attention | Backward, tiles: str) -> Tiled | TiledBackward | None:
    """A kernel of the declared policy in tiles that a certificate names in words; None for others.

    That of gradients takes O and LSE from the variant's own forward pass.
    """
    if (words := _TILES.fullmatch(tiles)) is None:
        return None
    keys, order, splits, lazily = words.groups()
    tiling = Tiling(br=int(keys), bc=int(keys), order=Order(order or "forward"), splits=int(splits or 1))
    if isinstance(variant, Backward):
        recompute = Recompute(exponential=Exponential.EXP2)
        return TiledBackward(variant.forward_pass, BackwardPrecision.kernel(variant.format), tiling, recompute, count=False)
    softmax = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0 if lazily else 0.0)
    return Tiled(Precision.kernel(variant.format), tiling, softmax, count=False)
