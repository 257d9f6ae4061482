"""Naive attention, both passes, against its lines written head by head, against torch's own operations, and against Exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, Format
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive, NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Exponential, Normalise
from tests.cases import BACKWARD_POLICIES, MASKS, POLICIES, Inputs, draw, draw_all, lse_of, same
from tests.oracles.double_loop import NEVER, add, decayed, multiplied, over, times, visibility

SIZES = (2, 4, 2, 19, 53, 12)
SCALE = 0.21


def head_by_head(q: Tensor, k: Tensor, v: Tensor, step: Precision, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """`S = scale Q K^T; P = exp(S - rowmax S); O = (P / l) V` for one head at a time, a cast after every operation."""
    out, lse = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype), torch.zeros(q.shape[:-1], dtype=q.dtype)
    sums = step.row_sum.accumulate
    for b in range(q.shape[0]):
        seen = visibility(mask, b, q.shape[2], k.shape[2])
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            s = times(step.scores.accumulate, multiplied(step, "scores", q[b, h], k[b, g].T), scale)
            s = torch.where(seen, s, NEVER)
            m = s.amax(1, keepdim=True)
            p = decayed(step.exponential, s, m, Exponential.EXP)
            row_sum = step.row_sum.sum(p)
            empty = row_sum == 0
            divisor = torch.where(empty, 1.0, row_sum)
            lse[b, h] = torch.where(empty, NEVER, add(sums, sums(torch.log(divisor)), torch.where(empty, 0.0, m)))[:, 0]
            out[b, h] = step.output(multiplied(step, "values", step.probabilities(over(step.exponential, p, divisor)), v[b, g]))
    return out, lse


@settings(max_examples=25)
@given(st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(MASKS)))
def test_every_policy_is_its_three_lines(name: str, mask: str) -> None:
    """With the division at the end it is one tile of `Tiled`, see `test_tiled`."""
    precision = POLICIES[name]
    q, k, v = precision.round_inputs(*draw(SIZES))
    got = Naive(precision, Normalise.EACH)(q, k, v, MASKS[mask], SCALE)
    out, lse = head_by_head(q, k, v, precision, MASKS[mask], SCALE)
    assert got.out.dtype is lse_of(got).dtype is precision.carrier
    assert torch.equal(got.out, out)
    assert torch.equal(lse_of(got), lse)


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("tokens", "dim", "seed"), [(64, 64, 0), (100, 24, 2)])
def test_eager_is_what_torch_does(fmt: Format, tokens: int, dim: int, seed: int) -> None:
    """Equal but where another order of an FP32 sum crosses a breakpoint, of few elements, and there by one ulp.

    An ulp of the row's largest element, since an element near zero is the difference of large ones. Of the n products of a sum
    the roundoffs, of either sign, make `sqrt(n) 2^-24` of it (Higham & Mary 2019, Theorem 2.4), in BF16 and FP16 less than a
    hundredth of the spacing; each element hangs on the scores and weights of its row, at most 100 of either.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, tokens, dim, generator=generator).to(fmt.dtype) for _ in range(3))
    native = (torch.softmax((q @ k.mT) * dim**-0.5, -1) @ v).double()
    ours = Naive(Precision.eager(fmt))(q.float(), k.float(), v.float(), Mask(), dim**-0.5).out.double()
    assert float((native != ours).double().mean()) < 0.25
    assert bool(((native - ours).abs() <= fmt.ulp(ours.abs().amax(-1, keepdim=True))).all())


FORWARD = Precision.eager(BF16)


def gradients_head_by_head(
    inputs: Inputs, step: BackwardPrecision, forward: Precision, mask: Mask, scale: float
) -> dict[str, Tensor]:
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
            dp = torch.where(seen, multiplied(step, "dp", do[b, h], v[b, g].T), 0.0)
            delta = step.delta.sum(times(step.delta.accumulate, dp, p))
            found["delta"][b, h] = delta[:, 0]
            difference = add(step.difference, dp, -delta)
            ds = times(step.ds, step.ds(times(step.difference, difference, p)), scale)
            found["dq"][b, h] = step.output(step.dq_sum(multiplied(step, "dq", ds, k[b, g])))
            found["dk"][b, g] = add(step.dk_sum, found["dk"][b, g], multiplied(step, "dk", ds.T, q[b, h]))
            found["dv"][b, g] = add(step.dv_sum, found["dv"][b, g], multiplied(step, "dv", step.probabilities(p).T, do[b, h]))
    return found | {name: step.output(found[name]) for name in ("dk", "dv")}


@settings(max_examples=15)
@given(st.sampled_from(sorted(BACKWARD_POLICIES)), st.sampled_from(sorted(MASKS)))
def test_every_backward_policy_is_its_lines(name: str, mask: str) -> None:
    policy = BACKWARD_POLICIES[name]
    inputs = policy.round_inputs(*draw_all(SIZES))
    got = NaiveBackward(policy, FORWARD)(*inputs, MASKS[mask], SCALE)
    same(got, gradients_head_by_head(inputs, policy, FORWARD, MASKS[mask], SCALE))


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
