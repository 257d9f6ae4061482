"""The assertion and the fixture for tests of one's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from numdev.attention.mask import Mask
from numdev.cli import certify
from numdev.testing import assert_as_accurate_as
from tests.certification.forward_kernels import CORRECT, Flash, bf16

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("name", ["FA2, 48", "FA4, 128 lazy", "decoding, 4 splits of 64"])
def test_a_right_result_is_accepted(name: str) -> None:
    q, k, v = (torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (64, 300, 300))
    out, lse = CORRECT[name](q, k, v, mask=Mask(causal=True), scale=0.125)
    assert_as_accurate_as(out, q, k, v, mask=Mask(causal=True), lse=lse)


@pytest.mark.slow
def test_the_message_has_ratio_permitted_error_worst_element_and_step() -> None:
    q, k, v = (torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (64, 500, 500))
    out, lse = Flash(64, total=bf16)(q, k, v, mask=Mask(), scale=0.125)
    with pytest.raises(AssertionError) as error:
        assert_as_accurate_as(out, q, k, v, lse=lse)
    text = str(error.value)
    worst = (out.double() - torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())).abs()
    assert str(list(map(int, torch.unravel_index(worst.argmax(), worst.shape)))) in text
    assert "times what kernel_bf16 permits" in text
    assert "the row sum in BF16" in text


@pytest.mark.slow
def test_the_fixture_fails_with_the_certificate_and_leaves_it_beside_junit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        mine="""
        import torch
        def zeros(q, k, v, *, mask, scale):
            return torch.zeros_like(q)
        """,
        test_mine="""
        def test_kernel(certify):
            certify("mine:zeros", only=["one key"], device="cpu")
        """,
    )
    ran = pytester.runpytest_subprocess("-p", "no:numdev", "-p", "numdev.testing", "--junitxml=out.xml", "--numdev-depth=quick")
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["*FAIL: mine:zeros under kernel_bf16*"])
    assert json.loads((pytester.path / "certificate-test_kernel.json").read_text())["verdict"] == "fail"


@pytest.mark.slow
def test_a_kernel_lies_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_kernel.py").write_text("def attention(q, k, v, *, mask, scale):\n    return v[:, :, :1].expand_as(q)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert certify.run(["own_kernel:attention", "only=[one key]", "device=cpu", "out=here", "cache=here"]) == 0
    assert json.loads((tmp_path / "here" / "certificate.json").read_text())["verdict"] == "limited"
    assert certify.run(["own_kernel:attention", "only=null", "device=cpu", "out=here", "cache=here"]) == 1
    assert json.loads((tmp_path / "here" / "certificate.json").read_text())["only"] == ["null"]
