"""The naive backward pass against its lines written head by head, against autograd of torch, and against one tile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16
from numdev.attention.exact import ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Exponential
from tests.attention.backward.cases import POLICIES, Inputs, bounds, draw_all, same
from tests.cases import MASKS, U64, Sizes
from tests.oracles.double_loop import NEVER, add, decayed, is_fully_masked, over, times, visibility

SIZES: Sizes = (2, 4, 2, 37, 53, 24)
SCALE = 0.21
FORWARD = Precision.eager(BF16)


def head_by_head(inputs: Inputs, step: BackwardPrecision, forward: Precision, mask: Mask, scale: float) -> dict[str, Tensor]:
    """P as softmax stores it, then the gradients of `P V`, softmax, the scaling and `Q K^T`; a cast after every operation."""
    q, k, v, do = inputs
    found = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v), "delta": torch.zeros(q.shape[:3])}
    found["delta"] = found["delta"].to(q.dtype)
    narrow = forward.carrier
    for b in range(q.shape[0]):
        seen = visibility(mask, b, q.shape[2], k.shape[2])
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            s = times(forward.scores.accumulate, forward.scores(q[b, h].to(narrow), k[b, g].T.to(narrow)), scale)
            s = torch.where(seen, s, NEVER)
            p = decayed(forward.exponential, s, s.amax(1, keepdim=True), Exponential.EXP)
            total = forward.row_sum.sum(p)
            stored = over(forward.exponential, p, torch.where(total == 0, 1.0, total))
            p = forward.probabilities(stored).to(q.dtype)  # type: ignore[call-arg,arg-type]
            dp = torch.where(seen, step.dp(do[b, h], v[b, g].T), 0.0)
            delta = step.delta.sum(times(step.delta.accumulate, dp, p))
            found["delta"][b, h] = delta[:, 0]
            difference = add(step.difference, dp, -delta)
            ds = times(step.ds, step.ds(times(step.difference, difference, p)), scale)
            found["dq"][b, h] = step.output(step.dq_sum(step.dq(ds, k[b, g])))
            found["dk"][b, g] = add(step.dk_sum, found["dk"][b, g], step.dk(ds.T, q[b, h]))
            found["dv"][b, g] = add(step.dv_sum, found["dv"][b, g], step.dv(step.probabilities(p).T, do[b, h]))
    return found | {name: step.output(found[name]) for name in ("dk", "dv")}


@settings(max_examples=15)
@given(st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(MASKS)))
def test_every_policy_is_its_lines(name: str, mask: str) -> None:
    policy = POLICIES[name]()
    inputs = policy.round_inputs(*draw_all(SIZES))
    got = NaiveBackward(policy, FORWARD)(*inputs, MASKS[mask], SCALE)
    same(got, head_by_head(inputs, policy, FORWARD, MASKS[mask], SCALE))


@pytest.mark.parametrize("mask", MASKS)
def test_double_precision_is_exact(mask: str) -> None:
    """No step of the naive pass errs more than that of the tiled one; the scaling of dS is one rounding beside it."""
    inputs = draw_all(SIZES, spread=3.0)
    got = NaiveBackward(BackwardPrecision.golden(), Precision.golden())(*inputs, MASKS[mask])
    want, bound = ExactBackward()(*inputs, MASKS[mask]).tensors(), bounds(inputs, 24**-0.5)
    for name, tensor in got.tensors().items():
        assert float((tensor - want[name]).abs().max()) <= 2.1 * vars(bound)[name] * U64, name
    empty = is_fully_masked(MASKS[mask], 2, 37, 53)[:, None].expand(2, 4, 37)
    assert bool((got.dq[empty] == 0).all())


def test_ds_is_rounded_before_its_scaling_and_after_it() -> None:
    """By torch itself, bit for bit: with q = 0, `P = 1 / 2`, and with dO = 1, `dS = (v_0 - v_1) / 4` is exact in FP32.

    k = (1, 0) makes it dQ, and 7/32 is a number of BF16, so that BF16 products are exact in FP32: there are two roundings.
    """
    v = (1 + torch.rand(1, 512, 2, 1, generator=torch.Generator().manual_seed(4))).bfloat16()
    v[:, :, 1] /= 16
    q, k, do = torch.zeros_like(v[:, :, :1]).requires_grad_(), torch.zeros_like(v), torch.ones_like(v[:, :, :1])
    k[:, :, 0] = 1
    (torch.softmax((q @ k.mT) * (7 / 32), -1) @ v).backward(do)  # type: ignore[no-untyped-call]
    ds = (v[:, :, :1] - v[:, :, 1:].float()) / 4
    assert q.grad is not None
    assert torch.equal(q.grad, (ds.bfloat16().float() * (7 / 32)).bfloat16())
    assert not torch.equal(q.grad, (ds * (7 / 32)).bfloat16())
    variant = NaiveBackward.eager(BF16)
    assert torch.equal(variant(*variant.round_inputs(q.detach(), k, v, do), Mask(), 7 / 32).dq, q.grad.float())


@pytest.mark.parametrize("step", Precision.golden().steps())
def test_it_honours_the_steps_of_the_forward_pass_that_it_reads(step: str) -> None:
    inputs = draw_all((1, 2, 1, 7, 9, 4))
    both = (Precision.golden(), Precision.golden().with_step(**{step: "bf16"}))
    plain, changed = (NaiveBackward(BackwardPrecision.golden(), forward)(*inputs, Mask()).dv for forward in both)
    assert torch.equal(plain, changed) != (f"forward_precision.{step}" in NaiveBackward.accepted_settings.names)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padding_touches_nothing_whatever_it_holds(poison: float) -> None:
    variant = NaiveBackward.eager(BF16)
    mask = Mask(causal=True, key_lengths=(30, 0))
    q, k, v, do = variant.round_inputs(*draw_all((2, 4, 2, 37, 35, 24)))
    clean = variant(q, k, v, do, mask).tensors()
    k[0, :, 30:], v[0, :, 30:], k[1], v[1] = poison, poison, poison, poison
    hidden = is_fully_masked(mask, 2, 37, 35)[:, None].expand(2, 4, 37)
    q[hidden], do[hidden] = poison, poison
    same(variant(q, k, v, do, mask), clean)
    assert all(bool(tensor.isfinite().all()) for tensor in clean.values())


def test_replicates_draw_anew() -> None:
    policy = BackwardPrecision.kernel(FP16).with_step(ds="fp16:stochastic")
    variant = NaiveBackward(policy, Precision.eager(FP16))
    inputs = variant.round_inputs(*draw_all(SIZES))
    first, other = variant(*inputs, Mask()), variant.replicate(1)(*inputs, Mask())
    same(variant(*inputs, Mask()), first.tensors())
    assert not torch.equal(first.dq, other.dq)
    assert torch.equal(first.dv, other.dv)
    assert NaiveBackward.eager(FP16).replicate(1) == NaiveBackward.eager(FP16)
