"""Probes of structure: what must hold to the bit, or within the error that is permitted, whatever the inputs are.

A probe returns why it fails, in words, or None. It takes inputs of which most are those of the case `normal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.certification.accuracy import permitted
from numdev.certification.cases import CASES, Case
from numdev.certification.catalogue import Outputs
from numdev.certification.kernel import Kernel
from numdev.certification.predictions import Known, Predictions

_GUARD = 64  # numbers beside an input, which a kernel must not write
_LARGE = 122.0  # by so much scores jump: an exponential of it overflows FP32
_MANY = Case("many rows", "single wrong elements", heads=16, kv_heads=16, queries=1024, keys=64)
_CASES = {case.name: case for case in CASES}
_TOLERANCE = 2.0  # times the permitted error: the difference of two results, each of which may err by it


@dataclass(frozen=True)
class Probing:
    """A kernel, a seed, and the results that several probes use."""

    kernel: Kernel
    predictions: Predictions
    seed: int

    def known(self, name: str) -> Known:
        return self.predictions.of(_CASES[name], self.seed)

    @cached_property
    def usual(self) -> Outputs:
        """The outputs on the case `normal`."""
        return self.kernel.on(self.known("normal").inputs)

    def differ(self, name: str, x: Tensor, other: Tensor) -> str | None:
        """Whether two results of one problem differ by more than both may err; neither holds NaN where the other has none."""
        rmse, most = float((x.double() - other.double()).pow(2).mean().sqrt()), permitted(self.known(name), "out").rmse
        if rmse <= _TOLERANCE * most:
            return None
        return f"the results differ by {rmse:.2g} (RMS), {rmse / most if most else math.inf:.3g} times the permitted error"


def _values_of_one(at: Probing) -> str | None:
    inputs = at.known("normal").inputs
    out = at.kernel.on(inputs, v=torch.ones_like(inputs.tensors["v"]))["out"].double()
    # P is rounded to the format of the inputs, l is not: the mean of errors of up to u each; then the output is rounded.
    most = 2 * at.predictions.policy.output.to.u
    worst = float((out - 1).abs().max())
    return None if worst <= most else f"with v = 1 the output is off 1 by up to {worst:.2g}; permitted is {most:.2g}"


def _permuted_keys(at: Probing) -> str | None:
    inputs = at.known("normal").inputs
    order = torch.randperm(inputs.tensors["k"].shape[-2], generator=torch.Generator().manual_seed(at.seed))
    moved = at.kernel.on(inputs, k=inputs.tensors["k"][:, :, order], v=inputs.tensors["v"][:, :, order])
    return at.differ("normal", moved["out"], at.usual["out"])


def _same_bits(at: Probing) -> str | None:
    """Also in another stream of a GPU."""
    inputs, streams = at.known("normal").inputs, list[AbstractContextManager[Any]]([nullcontext()])
    if at.kernel.device.type == "cuda":
        streams.append(torch.cuda.stream(torch.cuda.Stream()))
    for stream in streams:
        with stream:
            again = at.kernel.on(inputs)
        if unequal := [name for name in again if not torch.equal(again[name], at.usual[name])]:
            return f"two calls differ in {' and '.join(unequal)}"
    return None


def _slices(at: Probing) -> str | None:
    inputs = at.known("grouped heads").inputs
    whole, x = at.kernel.on(inputs)["out"], inputs.tensors
    group = x["q"].shape[1] // x["k"].shape[1]
    head = at.kernel.on(inputs, q=x["q"][:, :group], k=x["k"][:, :1], v=x["v"][:, :1])["out"]
    entry = at.kernel.on(inputs, **{name: each[:1] for name, each in x.items()})["out"]
    rows = at.kernel.on(inputs, q=x["q"][:, :, :7])["out"]
    parts = {
        "one head": (head, whole[:, :group]),
        "one batch entry": (entry, whole[:1]),
        "seven queries": (rows, whole[:, :, :7]),
    }
    for name, (own, expected) in parts.items():
        if reason := at.differ("grouped heads", own, expected):
            return f"{name} alone gives another result than in its batch: {reason}"
    return None


def _layouts(at: Probing) -> str | None:
    """Tokens before heads in memory, and tensors inside of larger ones."""
    inputs = at.known("normal").inputs

    def turned(x: Tensor) -> Tensor:
        wider = torch.full((*x.shape[:2], x.shape[2] + 2, x.shape[3] + 8), math.nan, dtype=x.dtype, device=x.device)
        wider[:, :, 1:-1, : x.shape[3]] = x
        return wider[:, :, 1:-1, : x.shape[3]]

    def transposed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    for name, change in (("tokens before heads", transposed), ("strided", turned)):
        q, k, v = (change(x.to(at.kernel.device)) for x in inputs.qkv)
        out = at.kernel(q, k, v, inputs.mask, inputs.scale)["out"].cpu()
        if reason := at.differ("normal", out, at.usual["out"]):
            return f"inputs with another layout ({name}) give another result: {reason}"
    return None


def _untouched(at: Probing) -> str | None:
    """Inputs, and what lies beside them in memory."""
    inputs, device = at.known("normal").inputs, at.kernel.device
    wholes, views = [], []
    for x in inputs.qkv:
        whole = torch.full((x.numel() + 2 * _GUARD,), 3.0, dtype=x.dtype, device=device)
        whole[_GUARD:-_GUARD] = x.to(device).flatten()
        wholes.append(whole)
        views.append(whole[_GUARD:-_GUARD].view(x.shape))
    before = [whole.clone() for whole in wholes]
    q, k, v = views
    at.kernel(q, k, v, inputs.mask, inputs.scale)
    for name, old, new in zip("qkv", before, wholes, strict=True):
        if not torch.equal(old[_GUARD:-_GUARD], new[_GUARD:-_GUARD]):
            return f"the call changes {name}"
        if not torch.equal(old, new):
            return f"the call writes beside {name}"
    return None


def _unread(at: Probing, case: str, unread: Tensor, values: tuple[float, ...], what: str) -> str | None:
    """Whether values that are not finite, in keys that no query reads, change a bit."""
    inputs = at.known(case).inputs
    clean = at.kernel.on(inputs)["out"]
    for value in values:
        changed = {name: inputs.tensors[name].masked_fill(unread, value) for name in "kv"}
        if not torch.equal(at.kernel.on(inputs, **changed)["out"], clean):
            return f"{value} in {what} reaches the result"
    return None


def _padding(at: Probing) -> str | None:
    inputs = at.known("key lengths").inputs
    lengths = torch.tensor(inputs.mask.key_lengths)[:, None, None, None]
    gone = torch.arange(inputs.tensors["k"].shape[-2])[:, None] >= lengths
    return _unread(at, "key lengths", gone, (math.nan, math.inf), "padded keys")


def _unseen_keys(at: Probing) -> str | None:
    """Keys before the window of the first query."""
    inputs = at.known("window").inputs
    queries, keys = inputs.tensors["q"].shape[-2], inputs.tensors["k"].shape[-2]
    unseen = torch.arange(keys)[:, None] <= keys - queries - (inputs.mask.window or 0)
    return _unread(at, "window", unseen, (math.nan,), "keys that no query sees")


def _other_heads(at: Probing) -> str | None:
    inputs = at.known("grouped heads").inputs
    k = inputs.tensors["k"].clone()
    k[:, -1] = math.nan
    out = at.kernel.on(inputs, k=k)["out"].isnan()
    own = out.shape[1] // k.shape[1]
    if bool(out[:, :-own].any()):
        return "NaN in one head reaches others"
    return None if bool(out[:, -own:].all()) else "NaN in k gives results that are not NaN"


def _empty_rows(at: Probing) -> str | None:
    inputs = at.known("tall causal").inputs
    outputs, empty = at.kernel.on(inputs), inputs.tensors["q"].shape[-2] - inputs.tensors["k"].shape[-2]
    out = outputs["out"][:, :, :empty]
    if not bool((out == 0).all()):
        return f"rows that see no key are {'NaN' if bool(out.isnan().any()) else f'up to {float(out.abs().max()):.2g}'}, not 0"
    if "lse" in outputs and not bool(outputs["lse"][:, :, :empty].isneginf().all()):
        return "the LSE of rows that see no key is not -inf"
    return None


def _far_scores(at: Probing) -> str | None:
    """Scores that jump by more than an exponential in FP32 can hold: they need the running maximum."""
    inputs = at.known("normal").inputs
    q, k = inputs.tensors["q"].clone(), inputs.tensors["k"].clone()
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :, k.shape[-2] // 2 :, 0] = _LARGE / inputs.scale
    out = at.kernel.on(inputs, q=q, k=k)["out"].double()
    golden = Exact()(q, k, inputs.tensors["v"], Mask(), inputs.scale).out
    rmse, most = float((out - golden).pow(2).mean().sqrt()), permitted(at.known("normal"), "out").rmse
    if not rmse <= 4 * most:  # half of the keys are left, whose errors average less by the root of 2, at larger scores
        return f"scores that jump by {_LARGE:g} give an RMSE of {rmse:.2g}, {rmse / most:.3g} times that of usual scores"
    return None


def _range_of_values(at: Probing) -> str | None:
    """V times a power of two, within the range of the format: the results are the same but for the factor."""
    inputs, fmt = at.known("normal").inputs, at.predictions.policy.output.to
    powers = (20, -40) if fmt.emax > 15 else (8, -3)
    for power in powers:
        scaled = at.kernel.on(inputs, v=inputs.tensors["v"] * 2.0**power)["out"].double() * 2.0**-power
        if not torch.equal(scaled, at.usual["out"].double()) and (reason := at.differ("normal", scaled, at.usual["out"])):
            return f"v times 2^{power} is not the result times 2^{power}: {reason}"
        if not torch.equal(scaled, at.usual["out"].double()) and fmt.emax > 15:
            return f"v times 2^{power} changes bits of the result"
    return None


def _every_element(at: Probing) -> str | None:
    known = at.predictions.of(_MANY, at.seed)
    largest = permitted(known, "out").largest
    error = (at.kernel.on(known.inputs)["out"].double() - known.golden["out"]).abs()
    worst = int(error.nan_to_num(math.inf).argmax())
    if not float(error.flatten()[worst]) <= 2 * largest:
        place = list(map(int, torch.unravel_index(torch.tensor(worst), error.shape)))
        times = float(error.flatten()[worst]) / largest
        return f"of {error.numel()} elements, {place} errs by {times:.3g} times the largest permitted error"
    return None


@dataclass(frozen=True)
class Probe:
    """A property with the sentence that states it; a kernel may lack one that is only noted."""

    name: str
    states: str
    check: Callable[[Probing], str | None]
    is_noted: bool = False


PROBES = (
    Probe("untouched", "A call changes neither its inputs nor what lies beside them.", _untouched),
    Probe("same bits", "Two calls return the same bits, in another stream too.", _same_bits),
    Probe("layouts", "The result does not depend on the strides of the inputs.", _layouts),
    Probe("slices", "A head, a batch entry or a few queries alone give what they give together.", _slices),
    Probe("values of one", "With v = 1 the output is 1.", _values_of_one),
    Probe("permuted keys", "The order of the keys does not matter.", _permuted_keys),
    Probe("range of values", "The output is proportional to v over the range of its format.", _range_of_values),
    Probe("far scores", "Scores that jump by 122 do not overflow.", _far_scores),
    Probe("every element", "No element of a million is far off.", _every_element),
    Probe("empty rows", "A row that sees no key is 0, and its LSE -inf.", _empty_rows),
    Probe("padding", "NaN and Inf in padded keys do not reach the result.", _padding),
    Probe("unseen keys", "NaN in keys that no query sees does not reach the result.", _unseen_keys, is_noted=True),
    Probe("other heads", "NaN in one head reaches no other.", _other_heads),
)
"""Every probe of the forward pass, in the order in which they run."""
