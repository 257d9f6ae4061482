"""Kernels in Triton with planted faults: interpreted where there is no GPU, compiled where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from numdev.certification.accuracy import Verdict
from tests.certification.test_planted import is_named, on_few_cases
from tests.certification.triton_kernels import Fault, TritonBackward, TritonForward

HAS_GPU = torch.cuda.is_available()
DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=[pytest.mark.exhaustive, pytest.mark.skipif(HAS_GPU, reason="Triton compiles for the GPU")]),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]),
    ],
)
KERNELS = (TritonForward, TritonBackward)
FORWARD = {
    "SCORES_BF16": "scores",
    "SUM_BF16": "row_sum",
    "OUT_BF16": "accumulator",
    "ALPHA_BF16": "rescale",
    "EXP_BF16": "exp",
    "RESCALE_MISSED": "rescale",
    "LIMIT": "limit",
    "LSE_BASE_2": "lse",
    "PADDING_SUMMED": "",
}
BACKWARD = {
    "SCORES_BF16": "scores",
    "DQ_BF16": "dq",
    "DK_BF16": "dk",
    "DELTA_BF16": "delta",
    "DP_BF16": "dp",
    "DK_UNSCALED": "",
    "DELTA_LEFT_OUT": "",
    "QUERIES_LOST": "",
}
"""Faults, and what names their step; an empty pattern for those that have only to be caught."""


@DEVICES
@pytest.mark.parametrize(
    ("is_backward", "fault", "step"),
    [(is_backward, *each) for is_backward, faults in ((False, FORWARD), (True, BACKWARD)) for each in faults.items()],
)
def test_a_fault_is_named(device: str, is_backward: bool, fault: str, step: str, predictions: Path) -> None:
    certificate = on_few_cases(KERNELS[is_backward](Fault[fault]), is_backward, predictions, device)
    assert certificate.verdict is Verdict.FAIL, certificate.text()
    assert is_named(certificate, step) or not step, certificate.sentence()


@DEVICES
@pytest.mark.parametrize("is_backward", [False, True])
def test_a_right_kernel_passes(device: str, is_backward: bool, predictions: Path) -> None:
    certificate = on_few_cases(KERNELS[is_backward](), is_backward, predictions, device)
    assert certificate.verdict is Verdict.PASS, certificate.text()
