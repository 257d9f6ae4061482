"""The kind of measurement `certificate`: a kernel judged, how it is built, and how many bits of its output that predicts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from numdev.attention.base import Attention
from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.vendor.sdpa import Backend, SavingSdpa, Sdpa
from numdev.certification.certificate import certify
from numdev.errors import BadInput, Unsupported
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.results.record import Column, Use

_TILES = re.compile(r"tiles of (\d+) keys, (?:(forward|reverse)|(\d+) splits)(, lazy rescales)?")
_COLUMNS = (
    Column("seed", "", "the first seed", Use.PLACE),
    Column("verdict", "", "pass, limited, inconclusive or fail", Use.PLACE),
    Column("score", "relative", "permitted over measured RMSE of out, as the certificate has it", Use.CHIEF),
    Column("tiles", "", "size, order and splits of the tiles of keys, as the error of the kernel shows them", Use.PLACE),
    Column("equal", "relative", "share of out equal to the declared policy in these tiles, on the point's problem"),
    Column("sentence", "", "how the kernel computes, or which step errs", Use.PLACE),
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
        """One row for each first seed; raises Unsupported for what is no forward pass."""
        variant, problem = point.variant, point.problem
        if not isinstance(variant, Attention):
            raise Unsupported("operation", f"{type(variant).__name__} is no forward pass; give operation=attention")
        if isinstance(variant, Sdpa) and variant.backend is not Backend.MATH:
            variant = SavingSdpa(variant.backend, variant.fmt)  # which returns the LSE too
        policy, rows, kernel = Precision.kernel(variant.format), list[dict[str, Any]](), ""
        for seed in context.replicates():
            q, k, v = variant.round_inputs(*self.operation.draw(problem, seed, context.device))
            output = variant(q, k, v, **problem.arguments())  # first: what it cannot run at all is refused with its reason
            where = {"device": context.device.type, "head_dim": problem.shape.head_dim}
            certificate = certify(variant, policy.name, seed=seed, **where)
            tiles, equal = certificate.culprit.tiles if certificate.culprit else "", math.nan
            if model := emulation(policy, tiles):
                predicted = model(*(x.to(policy.carrier) for x in (q, k, v)), **problem.arguments()).out  # type: ignore[arg-type]
                equal = float((predicted == output.out.to(predicted.dtype)).double().mean())
            values = seed, certificate.verdict.value, certificate.score, tiles, equal, certificate.sentence()
            rows.append({column.name: value for column, value in zip(_COLUMNS, values, strict=True)})
            kernel = output.kernel
        return Findings({self.name: rows}, kernel)


def emulation(policy: Precision, tiles: str) -> Tiled | None:
    """Attention under a policy in tiles that a certificate names in words; None for others."""
    if (words := _TILES.fullmatch(tiles)) is None:
        return None
    keys, order, splits, lazily = words.groups()
    tiling = Tiling(bc=int(keys), order=Order(order or "forward"), splits=int(splits or 1))
    return Tiled(policy, tiling, OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0 if lazily else 0.0), count=False)
