"""Accuracy in tests of one's own: an assertion without a tolerance, and a fixture of pytest that certifies a kernel.

With numdev installed, pytest has the fixture `certify` and the option `--numdev-depth`:

    def test_my_kernel(certify):
        certify("mykernel:attention", precision="kernel_bf16")

It fails with the text of the certificate, and leaves `certificate-TEST.json` beside the file of `--junitxml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from numdev.attention.mask import Mask
    from numdev.certification.certificate import Certificate


def assert_as_accurate_as(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: str = "kernel_bf16",
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    lse: Tensor | None = None,
    margin: float = 1.10,
    culprit: bool = True,
) -> None:
    """Raise AssertionError unless the error of `out`, and of `lse`, is what a policy permits on these inputs.

    Permitted is `margin` times the largest RMSE of tiled attention under the policy, in the usual tiles and orders, against exact
    attention on q, k and v as they are; and twice that for the largest error. The message has the ratio, the permitted error, the
    worst element and the step that errs so.

    Args:
        out: `[batch, heads, queries, dim]`, of the kernel.
        q: what the kernel received, in the format of the policy's inputs.
        k: likewise.
        v: likewise.
        precision: preset of the policy.
        mask: nothing is masked unless given.
        scale: 1/sqrt(head_dim) unless given.
        lse: `[batch, heads, queries]`, natural logarithms.
        margin: see above.
        culprit: whether a failure says which step errs, for which it looks up to a minute; a result that passes needs none.
    """
    import torch

    from numdev.attention.base import check_shapes, softmax_scale
    from numdev.attention.mask import Mask
    from numdev.certification.accuracy import FIGURES, Known, Predictions, judge
    from numdev.certification.culprit import find
    from numdev.certification.kernel import Kernel, format_of
    from numdev.certification.simulation import Inputs
    from numdev.errors import BadInput

    mask, fmt = mask or Mask(), format_of(precision)
    check_shapes(q, k, v, mask)
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dtype != fmt.dtype:
            raise BadInput(name, x.dtype, f"give a tensor in {fmt.dtype}")
    inputs = Inputs({name: x.detach() for name, x in {"q": q, "k": k, "v": v}.items()}, mask, softmax_scale(q, scale))
    outputs = Kernel("out", lambda *_: (out, lse), fmt, q.device).on(inputs)  # checks their layouts
    inputs = replace(inputs, tensors={name: x.cpu() for name, x in inputs.tensors.items()})
    known = Known(Predictions(precision, q.shape[-1]), "own inputs", inputs)
    judged = [each for each in judge(known.ratios(outputs), margin) if each.figure != "bias"]
    wrong = next((each for each in judged if not each.ratio <= each.limit), None)
    if wrong is None:
        return
    x, golden = outputs[wrong.output], known.golden[wrong.output]
    error = (x.double() - golden).abs().nan_to_num(float("inf"))
    worst = tuple(map(int, torch.unravel_index(error.argmax(), error.shape)))
    most = float(known.permitted[wrong.output][0, FIGURES.index(wrong.figure)])
    raise AssertionError(
        f"{wrong.figure} of {wrong.output} is {wrong.ratio:.3g} times what {precision} permits ({most:.3g}); "
        f"the limit is {wrong.limit:.3g}. Worst at {list(worst)}: {float(x[worst]):.6g}, exact {float(golden[worst]):.6g}."
        + (f" The kernel {find([(known, outputs)]).sentence()}." if culprit else "")
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--numdev-depth`."""
    text = "how deep the fixture certify looks: quick (the default) or full"
    parser.getgroup("numdev").addoption("--numdev-depth", default="quick", choices=("quick", "full"), help=text)


@pytest.fixture
def certify(request: pytest.FixtureRequest) -> Callable[..., Certificate]:
    """Certifies a kernel, see `numdev.certify`, and fails the test unless it is as accurate as its policy permits."""
    junit, depth = request.config.getoption("xmlpath", None), str(request.config.getoption("--numdev-depth"))

    def run(kernel: object, precision: str = "kernel_bf16", **settings: Any) -> Certificate:
        from numdev.certification.certificate import certify

        certificate = certify(kernel, precision, depth=depth, **settings)
        if junit:
            name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
            Path(junit).resolve().with_name(f"certificate-{name}.json").write_bytes(certificate.json())
        if certificate.exit_code:
            pytest.fail(certificate.text(), pytrace=False)
        return certificate

    return run
