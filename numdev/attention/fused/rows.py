"""A block of rows and their state, one KV tile at a time, by compiled passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from numdev.arithmetic.products import product
from numdev.attention.fused import entry
from numdev.attention.fused import layout as at
from numdev.attention.fused.recipe import Recipe
from numdev.attention.recurrence import Rows, Run
from numdev.attention.steps import NEVER


@dataclass(frozen=True)
class Planes:
    """Numbers of every row of a block that all splits share, and what they count.

    Attributes:
        of_rows: `layout`'s planes, `[planes, matrices, rows]`.
        ranges: the first key that each row sees, and the one behind the last, `[2, matrices, rows]`.
        events: `layout`'s events.
    """

    of_rows: Tensor
    ranges: np.ndarray
    events: np.ndarray

    @staticmethod
    def over(ranges: Tensor) -> Planes:
        """Those of the rows whose keys are `ranges`."""
        of_rows = torch.zeros(at.PLANES, *ranges.shape[1:])
        of_rows[at.LARGEST] = NEVER
        return Planes(of_rows, ranges.numpy(), np.zeros(at.EVENTS, np.int64))


class FusedRows(Rows):
    """`Rows` whose tiles are worked on by compiled passes, with the same bits."""

    def __init__(self, run: Run, first: int, last: int, recipe: Recipe, planes: Planes) -> None:
        super().__init__(run, first, last, 0)
        self._recipe, self._planes = recipe, planes
        of_rows = planes.of_rows
        of_rows[at.M], of_rows[at.L] = NEVER, 0.0
        self.m, self.l = (of_rows[plane].view(self.m.shape) for plane in (at.M, at.L))
        self._rows = of_rows.numpy()
        self._o = self.o.view(-1, *self.o.shape[-2:]).numpy()

    def meet(self, index: int, tile: tuple[int, int]) -> None:
        run, recipe = self._run, self._recipe
        first, last = run.mask.query_range(run.q.shape[-2], run.k.shape[-2], *tile)
        first, last = max(first, self._first), min(last, self._last)
        if first >= last:
            return
        place = np.array([first - self._first, tile[0]])
        s = self._scores(run.q[..., first:last, :], run.k[..., slice(*tile), :].mT)
        flat = s.view(-1, *s.shape[-2:])
        planes, events, table = self._rows, self._planes.events, recipe.exponential.values
        entry.begin(flat.numpy(), planes, self._planes.ranges, place, recipe.operations, recipe.settings, table)
        if not table.size:
            flat.copy_(run.softmax.exp(flat)) if run.softmax.exp.is_binary else flat.exp_()
        if not recipe.rescale.values.size:
            self._decay(slice(place[0], last - self._first))
        table = recipe.rescale.values
        entry.finish(flat.numpy(), planes, events, place, recipe.operations, recipe.settings, table)
        values = self._values(s, run.v[..., slice(*tile), :])
        entry.add(self._o, values, planes, place, recipe.operations, recipe.settings)

    def _scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """`Q K^T`, not rounded yet unless it is within the tile."""
        dot = self._run.steps.precision.scores
        return (product(q, keys) if dot.every is None else dot(q, keys)).contiguous()

    def _decay(self, rows: slice) -> None:
        """The exponentials of alpha and beta, for which there is no table."""
        for plane in (at.FALLS, at.RISES):
            x = self._planes.of_rows[plane][:, rows]
            x.copy_(self._run.softmax.exp.exact(x.contiguous()))

    def _values(self, p: Tensor, v: Tensor) -> np.ndarray:
        """`P V`, likewise."""
        dot = self._run.steps.precision.values
        found = (product(p, v) if dot.every is None else dot(p, v)).contiguous()
        return found.view(-1, *found.shape[-2:]).numpy()
