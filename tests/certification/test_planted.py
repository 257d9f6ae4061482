"""Kernels as their authors might have written them: right ones pass, faults are caught and their step named, and none in vain.

Certify was not developed on these kernels, their tiles or this seed. `experiments/certify_power.py` runs them over many seeds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16
from numdev.attention.exact import Exact, ExactBackward
from numdev.certification.accuracy import Verdict
from numdev.certification.cases import CASES, Inputs
from numdev.certification.certificate import Certificate, certify
from tests.certification import backward_kernels, forward_kernels
from tests.certification.forward_kernels import Flash, Step
from tests.certification.triton_kernels import Fault, TritonForward

SEED = 7001
CASES_OF_TESTS = ("normal", "sink", "ramp", "captured", "causal", "tall causal", "window", "key lengths", "grouped heads")
PROBES_OF_TESTS = ("untouched", "same bits", "far scores", "every element", "empty rows")
NONE: Mapping[str, str] = {}
Certifier = Callable[..., Certificate]

_TILES = "its tiles are none that certify tries"
_DESIGN = "certify tries this step in another loop only"
NO_PASS = {"whole rows, FP32": "P is divided before its rounding", "two passes": "P is divided before its rounding"}
UNNAMED = {
    "l in BF16, 5 splits": _DESIGN,
    "tile sums in BF16": _TILES,
    "l over P in E4M3": "explained by too little of the error",
    "S in BF16 times log2 e": _DESIGN,
    "O in BF16, FA1": _DESIGN,
    "alpha O in BF16, 48": _DESIGN,
    "partial outputs in BF16": _DESIGN,
    "partial LSEs in BF16": _DESIGN,
    "P in E4M3 times 600, saturating": "the scale is none that certify tries",
    "P truncated": "certify knows no truncation",
    "exponent in BF16": "explained by too little of the error",
    "S - m in BF16": _TILES,
    "2^x of degree 2": "explained by too little of the error",
    "alpha of O in BF16, 32": _DESIGN,
    "1 / l in BF16": _DESIGN,
    "output truncated": "certify knows no truncation",
    "log2 e as 1.44": "explained by too little of the error",
    "1/sqrt(d) as 0.12": "explained by too little of the error",
    "1/sqrt(d + 1)": "explained by too little of the error",
    "softmax in BF16": _DESIGN,
    "S and O in BF16": "two faults",
}
UNNAMED_WITHOUT_LSE = UNNAMED | dict.fromkeys(("LSE in BF16", "LSE in FP16", "2^x of degree 3"), "shows in the LSE alone")
NAMED_QUICK = ("l in BF16, 80", "S in BF16, 48", "P V in BF16", "P in E5M2", "alpha in BF16, 48")
CAUGHT_QUICK = ("limit at the first key", "lengths ignored", "rescale of O missed", "last head not written")


def is_named(certificate: Certificate, step: str) -> bool:
    """Whether the sentence names a step, alone or among those that cannot be told from it; with an empty step, none."""
    culprit = certificate.culprit
    if culprit is None or not culprit.is_explained:
        return not step
    return bool(step) and any(re.search(step, rank.name) for rank in culprit.named)


def without_lse(kernel: Step) -> Step:
    return lambda q, k, v, *, mask, scale: kernel(q, k, v, mask=mask, scale=scale)[0]


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certifier:
    """Certifies on a few cases, with predictions that all workers share."""
    folder = tmp_path_factory.getbasetemp().parent / "predictions"

    def run(kernel: object, device: str = "cpu") -> Certificate:
        return certify(kernel, device=device, seed=SEED, only=(*CASES_OF_TESTS, *PROBES_OF_TESTS), cache=folder)

    return run


def params(table: Mapping[str, object], quick: Sequence[str] = (), missed: Mapping[str, str] = NONE) -> list[object]:
    """The names of a table: those that are not quick are marked slow, those that certify misses are expected to fail."""
    assert {*quick, *missed} <= {*table}
    slow = {name: [] if name in quick else [pytest.mark.slow] for name in table}
    fails = {name: [pytest.mark.xfail(reason=missed[name])] if name in missed else [] for name in table}
    return [pytest.param(name, marks=[*slow[name], *fails[name]]) for name in table]


@cache
def problems() -> dict[str, tuple[Inputs, Mapping[str, Tensor]]]:
    """Inputs, and exact attention and gradients in FP64."""
    result: dict[str, tuple[Inputs, Mapping[str, Tensor]]] = {}
    for case in CASES:
        if case.name in (*CASES_OF_TESTS, "large logits", "tiny values"):
            inputs = case.draw(range(SEED, SEED + 1), BF16, 64)
            qkv, do = inputs.qkv, inputs.tensors["do"]
            exact, gradients = Exact()(*qkv, inputs.mask, inputs.scale), ExactBackward()(*qkv, do, inputs.mask, inputs.scale)
            assert exact.lse is not None
            golden = {"out": exact.out, "lse": exact.lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
            result[case.name] = inputs, golden
    return result


def errors(kernel: Step, outputs: Sequence[str]) -> dict[tuple[str, str], float]:
    """RMSE of each output on each problem; infinite where a number is not finite, or is where it should not be."""
    result = {}
    for name, (inputs, golden) in problems().items():
        more = (golden["out"].bfloat16(), golden["lse"].float(), inputs.tensors["do"]) if "dq" in outputs else ()
        for output, x in zip(outputs, kernel(*inputs.qkv, *more, mask=inputs.mask, scale=inputs.scale), strict=True):
            error = torch.where(x.double() == golden[output], 0.0, x.double() - golden[output])
            result[name, output] = float(error.pow(2).mean().sqrt().nan_to_num(torch.inf))
    return result


PASSES: dict[str, tuple[Any, Step, tuple[str, ...]]] = {
    "forward": (forward_kernels, Flash(64), ("out", "lse")),
    "backward": (backward_kernels, backward_kernels.FlashGradients(64, 64), ("dq", "dk", "dv")),
}


@pytest.mark.parametrize("name", PASSES)
def test_right_kernels_err_alike_and_every_fault_errs_more(name: str) -> None:
    """By exact attention alone, without certify: the kernels of this folder are what they say."""
    module, plain, outputs = PASSES[name]
    usual = errors(plain, outputs)

    def worst(kernel: Step) -> float:
        return max(error / (usual[key] + 1e-6 * (key[1] == "lse") + 1e-30) for key, error in errors(kernel, outputs).items())

    assert {kernel: worst(each) for kernel, each in module.CORRECT.items() if worst(each) > 1.5} == {}
    faults = {**{kernel: each for kernel, (each, _) in module.PRECISION.items()}, **module.STRUCTURE, **module.OUTSIDE}
    assert {kernel: worst(each) for kernel, each in faults.items() if worst(each) < 1.08} == {}


RIGHT_QUICK = ("FA2, 48", "FA2, 80 reverse", "FA4, 128 lazy")


@pytest.mark.parametrize("name", params(forward_kernels.CORRECT, RIGHT_QUICK, NO_PASS))
def test_a_right_kernel_passes(certified: Certifier, name: str) -> None:
    certificate = certified(forward_kernels.CORRECT[name])
    assert certificate.verdict is Verdict.PASS, certificate.text()


@pytest.mark.parametrize("name", params(forward_kernels.PRECISION, NAMED_QUICK, UNNAMED))
def test_the_step_that_errs_is_named(certified: Certifier, name: str) -> None:
    kernel, step = forward_kernels.PRECISION[name]
    certificate = certified(kernel)
    assert certificate.verdict is Verdict.FAIL, certificate.text()
    assert is_named(certificate, step), certificate.sentence()


@pytest.mark.parametrize("name", params(forward_kernels.PRECISION, NAMED_QUICK[:2], UNNAMED_WITHOUT_LSE))
def test_the_step_that_errs_is_named_without_an_lse(certified: Certifier, name: str) -> None:
    kernel, step = forward_kernels.PRECISION[name]
    certificate = certified(without_lse(kernel))
    assert certificate.verdict is Verdict.FAIL, certificate.text()
    assert is_named(certificate, step), certificate.sentence()


@pytest.mark.parametrize("name", params(forward_kernels.STRUCTURE, CAUGHT_QUICK))
def test_a_wrong_loop_is_caught(certified: Certifier, name: str) -> None:
    certificate = certified(forward_kernels.STRUCTURE[name])
    assert certificate.verdict is Verdict.FAIL, certificate.text()


@pytest.mark.parametrize("name", params(forward_kernels.OUTSIDE))
def test_a_fault_outside_of_the_catalogue_gets_no_name(certified: Certifier, name: str) -> None:
    certificate = certified(forward_kernels.OUTSIDE[name])
    assert certificate.verdict is Verdict.FAIL, certificate.text()
    assert is_named(certificate, ""), certificate.sentence()


TRITON = {
    Fault.NONE: "",
    Fault.SCORES_BF16: "scores",
    Fault.SUM_BF16: "row_sum",
    Fault.OUT_BF16: "accumulator",
    Fault.ALPHA_BF16: "rescale",
    Fault.EXP_BF16: "exp",
    Fault.RESCALE_MISSED: "rescale missed",
    Fault.LIMIT: "limit",
    Fault.LSE_BASE_2: "lse base 2",
    Fault.PADDING_SUMMED: "",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", TRITON, ids=lambda fault: fault.name)
def test_kernels_in_triton(certified: Certifier, fault: Fault, device: str) -> None:
    """In the interpreter; on a GPU if there is one."""
    certificate = certified(TritonForward(fault), device=device)
    assert certificate.verdict is (Verdict.FAIL if fault else Verdict.PASS), certificate.text()
    assert is_named(certificate, TRITON[fault]) or not TRITON[fault], certificate.sentence()
