"""Counters against counting, one row, one key and one tile at a time, what the double loop met."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev import Cast, Dot, Exponential, Mask, Normalise, OnlineSoftmax, Order, Precision, Tiled, Tiling
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16
from tests.cases import MASKS, draw, lse_of
from tests.oracles.double_loop import DoubleLoop, Event, is_fully_masked

SIZES = (2, 2, 1, 9, 53, 8)


def count(events: list[Event], limit: float, rows: int) -> dict[str, float]:
    """The counters by their descriptions in `COUNTERS`, but for `lost_rows`."""
    rescales = ones = stagnated = flushed = saturated = entries = 0
    scores: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for event in events:
        batch, head, tile_rows = event.where
        seen, s, p, p_scaled, p_cast = (t.tolist() for t in (event.seen, event.s, event.p, event.p_scaled, event.p_cast))
        alpha, l_old = (t[:, 0].tolist() for t in (event.alpha, event.l_old))
        for i, row in enumerate(tile_rows):
            if not any(seen[i]):
                continue
            begun = l_old[i] > 0
            rescales += begun and alpha[i] != 1
            for before, added, after in event.additions:
                stagnated += before[i].item() > 0 and added[i].item() > 0 and after[i].item() == before[i].item()
            ones += p[i].count(1.0)
            for j in range(len(seen[i])):
                if seen[i][j]:
                    entries += 1
                    scores[batch, head, row].append(s[i][j])
                    flushed += p_cast[i][j] == 0
                    saturated += p_scaled[i][j] > limit
    tied = sum(row.count(max(row)) > 1 for row in scores.values())
    return {
        "rescales_per_row": rescales / rows,
        "tied_rows": tied / rows,
        "p_one_per_row": ones / rows,
        "p_flushed": flushed / max(entries, 1),
        "p_saturated": saturated / max(entries, 1),
        "stagnated_per_row": stagnated / rows,
    }


FLUSHING = Precision.kernel(BF16).with_step(probabilities=Cast(E4M3FN))
STAGNANT = Precision.uniform(BF16).with_step(row_sum=Dot.parse("e5m2"))
CASES = {
    "plain": (Precision.uniform(BF16), Tiling(16, 16), OnlineSoftmax(), 1.0),
    "each": (Precision.uniform(E5M2), Tiling(16, 8, Order.REVERSE), OnlineSoftmax(Normalise.EACH), 1.0),
    "lazy": (Precision.uniform(E5M2), Tiling(16, 8), OnlineSoftmax(rescale_threshold=1.0), 2.0),
    "shifted": (Precision.uniform(E5M2), Tiling(16, 8), OnlineSoftmax(tie_shift=2.0), 0.5),
    "splits": (Precision.uniform(E5M2), Tiling(16, 8, splits=3), OnlineSoftmax(exp=Exponential.EXP2), 0.5),
    "flushed": (FLUSHING, Tiling(16, 16), OnlineSoftmax(), 8.0),
    "saturated": (FLUSHING, Tiling(16, 8), OnlineSoftmax(p_scale=400.0, rescale_threshold=2.0), 2.0),
    "a polynomial above 1": (
        Precision.kernel(BF16).with_step(probabilities="int2"),
        Tiling(16, 8),
        OnlineSoftmax(exp=Exponential.parse("exp2_poly2")),
        1.0,
    ),
    "stagnant": (STAGNANT, Tiling(16, 4), OnlineSoftmax(), 0.5),
}


@settings(max_examples=30)
@given(st.sampled_from(sorted(CASES)), st.sampled_from(sorted(MASKS)))
def test_counters_are_what_counting_gives(case: str, mask: str) -> None:
    precision, tiling, soft, spread = CASES[case]
    inputs = precision.round_inputs(*draw(SIZES, spread=spread))
    events: list[Event] = []
    _, lse = DoubleLoop(precision, tiling, soft)(*inputs, MASKS[mask], 0.3, events)
    counted = Tiled(precision, tiling, soft)(*inputs, MASKS[mask], 0.3).counters
    lost = lse.isneginf() & ~is_fully_masked(MASKS[mask], 2, 9, 53)[:, None]
    expected = count(events, precision.probabilities.largest, 2 * 2 * 9) | {"lost_rows": lost.double().mean().item()}
    assert counted == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "scores", "lazy"),
    [
        # 288, 288 | 16, 16: the shift makes 576, which is NaN in E4M3 and not followed, so that P is exp(288) twice.
        ({"scores": "e4m3fn"}, [288.0, 288.0, 16.0, 16.0], OnlineSoftmax(tie_shift=2.0, rescale_threshold=1.0)),
        # 0 | 8.785 below a threshold of 8.79: BF16 makes the distance 8.8125, and 2^8.8125 > 448 > 2^8.79.
        ({"exponential": "bf16"}, [0.0, 8.785], OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.79)),
    ],
)
def test_a_lazy_maximum_may_let_p_saturate(step: dict[str, str], scores: list[float], lazy: OnlineSoftmax) -> None:
    precision = Precision.kernel(BF16).with_step(probabilities="e4m3fn:saturate", **step)
    k, half = torch.tensor(scores).view(1, 1, -1, 1), len(scores) // 2
    got = Tiled(precision, Tiling(half, half), lazy)(torch.ones(1, 1, 1, 1), k, k, Mask(), 1 / lazy.log_scale)
    assert got.counters["p_saturated"] == 0.5


def test_a_row_whose_exponentials_are_all_lost_is_zero_and_counted() -> None:
    """Shifted by 7 times its tied maximum, every exponential underflows in FP16: no sum, a result of 0, an LSE of -inf."""
    q = torch.full((1, 1, 3, 16), 4.0)
    k = torch.full((1, 1, 64, 16), 4.0)
    output = Tiled(Precision.uniform(FP16), Tiling(16, 16), OnlineSoftmax(tie_shift=7.0))(q, k, k, Mask(), 0.25)
    assert output.counters["lost_rows"] == 1.0
    assert bool((output.out == 0).all())
    assert bool(lse_of(output).isneginf().all())
