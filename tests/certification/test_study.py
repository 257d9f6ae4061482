"""The kind `certificate`: a row says what a certificate does, and counts the bits that the tiles of it predict."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from numdev.arithmetic.formats import BF16
from numdev.attention.base import Gradients, Output, Saved
from numdev.attention.mask import Mask
from numdev.attention.operation import ATTENTION, ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.attention.softmax import Exponential, OnlineSoftmax, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.attention.vendor.flash_attn import FlashAttn, FlashVersion
from numdev.attention.vendor.sage import SageAttention
from numdev.attention.vendor.vanilla import Vanilla
from numdev.certification import certificate
from numdev.certification.certificate import Certificates, certify
from numdev.errors import BadInput
from numdev.measurement.runner import Runner

KERNEL = Precision.kernel(BF16)
EXP2 = OnlineSoftmax(exp=Exponential.EXP2)
PROBLEM = Problem(Distribution(Kind.NORMAL), Shape(queries=50, keys=150, head_dim=64))


class InBfloat(Tiled):
    """Tiled attention that returns tensors in BF16, as a kernel does."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        output = super().__call__(q.float(), k.float(), v.float(), mask, scale)
        return Output(output.out.bfloat16(), output.lse)


@pytest.mark.slow
def test_a_row_is_a_certificate_and_the_bits_that_it_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One case is enough for the tiles; in them a kernel of the policy is predicted bit for bit, and another one is not."""
    monkeypatch.setattr(certificate, "certify", lambda *args, **more: certify(*args, **more, only=["normal"]))
    runner = Runner(Certificates(ATTENTION), "cpu")
    record = runner.measure(PROBLEM, InBfloat(KERNEL, Tiling(bc=64, order=Order.REVERSE), EXP2))
    (row,) = record.rows
    assert (record.kind, row["verdict"], row["tiles"]) == ("certificate", "pass", "tiles of 64 keys, reverse")
    assert (row["equal"], row["computes"][:31], row["fails"]) == (1.0, "computes as the declared policy", "")
    assert row["score"] > 0.9
    (row,) = runner.measure(PROBLEM, Vanilla(BF16)).rows
    assert (row["verdict"], "normal" in row["fails"]) == ("fail", True)
    assert row["computes"][:19] == "errs as with scores"
    assert math.isnan(row["equal"]) or row["equal"] < 0.9


class Leaking(InBfloat):
    """Reads the padding of v, whose NaN reach the output."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        output = super().__call__(q, k, v, mask, scale)
        return Output(output.out + 0 * v.mean(), output.lse)


@pytest.mark.slow
def test_a_kernel_that_fails_by_a_probe_alone_computes_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "certify", lambda *args, **more: certify(*args, **more, only=["normal", "padding"]))
    (row,) = Runner(Certificates(ATTENTION), "cpu").measure(PROBLEM, Leaking(KERNEL, Tiling(bc=64), EXP2)).rows
    assert (row["verdict"], row["fails"], row["computes"][:31]) == ("fail", "padding", "computes as the declared policy")


class InBfloatBackward(TiledBackward):
    """Gradients of tiled attention in BF16, as a kernel returns them."""

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        saved = Saved(saved.out.float(), saved.lse.float())
        made = super().backward(q.float(), k.float(), v.float(), do.float(), saved, mask, scale)
        return Gradients(made.dq.bfloat16(), made.dk.bfloat16(), made.dv.bfloat16(), made.delta)


def test_gradients_are_certified_by_their_own_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "certify", lambda *args, **more: certify(*args, **more, only=["normal"]))
    forward, exp2 = Tiled(KERNEL, Tiling(bc=128), EXP2), Recompute(exponential=Exponential.EXP2)
    kernel = InBfloatBackward(forward, BackwardPrecision.kernel(BF16), Tiling(br=64, bc=64, order=Order.REVERSE), exp2)
    (row,) = Runner(Certificates(ATTENTION_BACKWARD), "cpu").measure(PROBLEM, kernel).rows
    assert (row["verdict"], row["tiles"][:9]) == ("pass", "tiles of ")
    assert row["equal"] > 0.99, "gradients are sums of rounded dS in FP32, which tiles change in few elements"


@pytest.mark.parametrize("name", ["flash_attn_2", "sageattention"])
def test_a_kernel_whose_package_is_absent_is_refused_at_once(name: str) -> None:
    kernel = SageAttention() if name == "sageattention" else FlashAttn(FlashVersion.FA2)
    if kernel.digest:
        pytest.skip(f"{kernel.digest} is installed")
    with pytest.raises(BadInput, match=rf"^kernel: '{name}' cannot be used; .* is not installed; pip install"):
        certify(name, device="cpu")


def test_a_baseline_is_refused() -> None:
    with pytest.raises(BadInput, match="baseline=none"):
        Runner(Certificates(ATTENTION), "cpu").measure(PROBLEM, Vanilla(BF16), Tiled(KERNEL))
