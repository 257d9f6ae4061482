"""Comparisons of kernels: with golden gradients, where memory held NaN before, and of launches with each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from numdev.attention.base import Gradients, Saved
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.triton import TritonBackward
from tests.attention.backward.cases import Inputs
from tests.attention.kernels.backward_budget import backward_budget, of_output


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` returns holds NaN, or a large number, so that an element that no kernel writes shows."""
    empty = torch.empty

    def poisoned(*args: object, **keywords: object) -> Tensor:
        made: Tensor = empty(*args, **keywords)  # type: ignore[call-overload]
        if made.is_floating_point():
            return made.fill_(float("nan")) if made.dtype.itemsize > 1 else made
        return made.fill_(123)

    monkeypatch.setattr(torch, "empty", poisoned)


def rounded(backward: TritonBackward, inputs: Inputs, device: str) -> Inputs:
    q, k, v, do = (x.to(device) for x in backward.round_inputs(*inputs))
    return q, k, v, do


def stored(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    q, k, v, do = (x.to(dtype) for x in inputs)
    return q, k, v, do


def saved_of(backward: TritonBackward, inputs: Inputs, mask: Mask, scale: float) -> Saved:
    """Golden O and LSE, as a kernel would save them."""
    golden = Exact()(*inputs[:3], mask, scale)
    assert golden.lse is not None
    return Saved(backward.precision.output(golden.out), golden.lse.float())


def check(backward: TritonBackward, inputs: Inputs, mask: Mask, device: str, *, product: float = 0.0) -> Gradients:
    """The gradients of a run on rounded inputs, after their comparison with golden ones on the same."""
    on_device, scale = rounded(backward, inputs, device), inputs[0].shape[-1] ** -0.5
    got = backward.backward(*on_device, saved_of(backward, on_device, mask, scale), mask, scale)
    golden = ExactBackward()(*on_device, mask, scale)
    bounds = backward_budget(backward.precision, on_device, mask, scale, product)
    for name in ("dq", "dk", "dv"):
        mine, exact = getattr(got, name), getattr(golden, name).cpu()
        assert mine.dtype == backward.fmt.dtype
        assert not bool(mine.isnan().any()), f"{name}: an element was not written"
        bound = of_output(getattr(bounds, name), exact, backward.precision)
        assert bool(((mine.double().cpu() - exact).abs() <= bound).all()), name
    assert got.delta is not None
    assert golden.delta is not None
    difference = (got.delta.double() - golden.delta).abs().cpu()
    assert bool((difference <= bounds.delta + 2.0**-24 * golden.delta.abs().cpu()).all()), "delta"
    hidden = ~mask.seeing_rows(on_device[0].shape[0], on_device[0].shape[2], on_device[1].shape[2])
    for x in (got.dq, got.delta):
        assert bool((x.cpu().transpose(1, 2)[hidden] == 0).all()), "rows that see nothing"
    return got


def same_bits(run: Callable[[], dict[str, Tensor]], often: int = 10, products: int = 1) -> None:
    """1000 launches alone, and 1000 beside a stream that gets some matrix products at every so many of them."""
    first = run()
    other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda")
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for launch in range(2000):
        if launch >= 1000 and launch % often == 0:
            with torch.cuda.stream(other):
                for _ in range(products):
                    busy @ busy
        again = run()
        different += sum((first[name] != again[name]).sum() for name in first)
    assert int(different) == 0
