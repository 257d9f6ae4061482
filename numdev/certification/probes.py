"""Probes of structure: inputs changed in a way whose effect is exactly known, such as NaN where nobody may look.

The outputs have to be as near to exact attention on the changed inputs as those of the unchanged case are, in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from numdev.certification.accuracy import ABSURD, BACKWARD, CASES, FORWARD, Case, Pass, Predictions
from numdev.certification.candidates import filled
from numdev.certification.kernel import Kernel
from numdev.certification.simulation import Inputs, Tensors
from numdev.errors import Unsupported

_WITHIN = 2.0  # times the error of the unchanged case, or the permitted one
_OWN = 4.0  # times the permitted error: so much of its own error a kernel may repeat; any of an LSE, which is often in few bits
_ATOMICS = 0.5  # times the permitted error: what two orders of additions may differ by
_GUARD = 64  # numbers beside an input, which a kernel must not write
_LARGE = 122.0  # by so much scores jump: an exponential of it overflows FP32
_SHIFT = 64.0  # of the products of q and k
_MANY = Case("many rows", "single wrong elements", heads=16, kv_heads=16, queries=1024, keys=64)
_CASES = {case.name: case for case in CASES}
Changes = Callable[[Inputs], list[Tensors]]
Place = Callable[[Tensor], Tensor]


def _slices(x: Inputs) -> list[Tensors]:
    """One batch entry, one head of k with those of q that read it, and seven queries."""
    one_head = {name: each[:, : 1 if name in ("k", "v") else x.group] for name, each in x.tensors.items()}
    queries = {name: each if name in ("k", "v") else each[:, :, :7] for name, each in x.tensors.items()}
    return [{name: each[:1] for name, each in x.tensors.items()}, one_head, queries]


def _plus(x: Inputs, of_keys: Tensor | float) -> list[Tensors]:
    """Adds to the product of each key with every query."""
    q, k = x["q"].clone(), x["k"].clone()
    q[..., 0], k[..., 0] = 1.0, of_keys
    return [{"q": q, "k": k}]


def _permuted(x: Inputs) -> list[Tensors]:
    order = torch.randperm(x.sizes[1], generator=torch.Generator().manual_seed(0))
    return [{name: x[name][:, :, order] for name in ("k", "v")}]


def _scaled(x: Inputs) -> list[Tensors]:
    """V, or dO of gradients, times powers of two within the range of the format."""
    name, powers = "do" if "lse" in x.tensors else "v", (8, -3) if x["q"].dtype == torch.float16 else (20, -40)
    return [{name: x[name] * 2.0**power} for power in powers]


def _padding(x: Inputs) -> list[Tensors]:
    where = torch.arange(x.sizes[1])[:, None] >= torch.tensor(x.mask.key_lengths)[:, None, None, None]
    return [{name: x[name].masked_fill(where, value) for name in "kv"} for value in (math.nan, math.inf)]


def _unseen(x: Inputs) -> list[Tensors]:
    """NaN before the window of the first query."""
    where = torch.arange(x.sizes[1])[:, None] <= x.sizes[1] - x.sizes[0] - (x.mask.window or 0)
    return [{name: x[name].masked_fill(where, math.nan) for name in "kv"}]


def _inside(x: Tensor) -> Tensor:
    """Within a larger tensor."""
    wider = x.new_full((*x.shape[:2], x.shape[2] + 2, *(size + 8 for size in x.shape[3:])), math.nan)
    return (wider[:, :, 1:-1, : x.shape[3]] if x.ndim == 4 else wider[:, :, 1:-1]).copy_(x)


def _rms(x: Tensor) -> float:
    return float(x.nan_to_num(0.0, 0.0, 0.0).pow(2).mean().sqrt().clamp(min=1e-300))


Check = Callable[[Kernel, Predictions, range], Iterator[tuple[str, bool]]]
"""Of some seeds: yields what is broken, and whether that is only noted."""


def _untouched(kernel: Kernel, predictions: Predictions, seeds: range) -> Iterator[tuple[str, bool]]:
    wholes = list[tuple[Tensor, Tensor]]()

    def guarded(x: Tensor) -> Tensor:
        whole = x.new_full((x.numel() + 2 * _GUARD,), 3.0)
        inner = whole[_GUARD:-_GUARD].view(x.shape).copy_(x)
        wholes.append((whole, whole.clone()))
        return inner

    kernel.on(predictions.of(_CASES["normal"], seeds).inputs, guarded)
    for name, (whole, before) in zip(kernel.takes, wholes, strict=True):
        if not torch.equal(whole, before):
            is_inside = not torch.equal(whole[_GUARD:-_GUARD], before[_GUARD:-_GUARD])
            yield f"the call {'changes' if is_inside else 'writes beside'} {name}", False


def _same_bits(kernel: Kernel, predictions: Predictions, seeds: range) -> Iterator[tuple[str, bool]]:
    """Gradients may be added by atomics, in any order: that they differ a little is noted."""
    known = predictions.of(_CASES["normal"], seeds)
    calls = [kernel.on(known.inputs) for _ in range(2)]
    if kernel.device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            calls.append(kernel.on(known.inputs))
    for again, (name, x) in product(calls[1:], calls[0].items()):
        if not torch.equal(again[name].nan_to_num(), x.nan_to_num()):
            times = _rms(again[name].double() - x.double()) / float(known.permitted[name][:, 0].max())
            is_noted = predictions.of_pass is BACKWARD and times <= _ATOMICS
            yield f"a second call: {name} differs by {times:.3g} times the permitted error (RMS)", is_noted


def _every_element(kernel: Kernel, predictions: Predictions, seeds: range) -> Iterator[tuple[str, bool]]:
    known = predictions.of(_MANY, seeds[:1])
    for name, x in kernel.on(known.inputs).items():
        most = float(known.permitted[name][0, 1] + known.floors[name][0, 0])
        error = (x.double() - known.golden[name]).abs().nan_to_num(math.inf)
        if not float(error.max()) <= _WITHIN * most:
            place, times = list(map(int, torch.unravel_index(error.argmax(), error.shape))), float(error.max()) / most
            yield f"of {error.numel()} elements of {name}, {place} errs by {times:.3g} times the largest permitted error", False


@dataclass(frozen=True)
class Probe:
    """A property with the sentence that states it, and changes of a case, or places of it, that show it, or a check of its own.

    A kernel may lack one that is only noted. `only` is the pass that has it.
    """

    name: str
    states: str
    changes: Changes = lambda x: [{}]
    case: str = "normal"
    places: tuple[Place, ...] = (Tensor.clone,)
    check: Check | None = None
    is_noted: bool = False
    only: Pass | None = None

    def run(self, kernel: Kernel, predictions: Predictions, seeds: range) -> Probed:
        """Check the property; the first failure counts, else the last of what is noted."""
        outcome, reason = "holds", ""
        try:
            for broken, is_noted in (self.check or self._changed)(kernel, predictions, seeds):
                if outcome != "fails":
                    outcome, reason = "noted" if is_noted else "fails", broken
        except Unsupported as error:
            outcome, reason = "skipped", str(error)
        return Probed(self.name, self.states, outcome, reason)

    def _changed(self, kernel: Kernel, predictions: Predictions, seeds: range) -> Iterator[tuple[str, bool]]:
        """In which output, and how far, a kernel errs on changed inputs; not where exact attention is NaN."""
        known, limits = predictions.of(_CASES[self.case], seeds), dict[str, float]()  # of the RMSE, over the RMS of what is exact
        for name, ratio in known.ratios(kernel.on(known.inputs)).items():
            permitted = float((known.permitted[name] + known.floors[name])[:, 0].max())
            own = permitted * float(ratio[:, 0].max().clamp(1.0, ABSURD if name == "lse" else _OWN))
            limits[name] = _WITHIN * own / _rms(known.golden[name])
        for changed, place in product(self.changes(known.inputs), self.places):
            inputs = replace(known.inputs, tensors=known.inputs.tensors | changed)
            golden = predictions.of_pass.golden(inputs)
            for name, x in kernel.on(inputs, place).items():
                error = (x.double() - golden[name]).masked_fill((x == golden[name]) | golden[name].isnan(), 0.0)
                wrong = ~error.isfinite() | ((golden[name] == 0) & (error != 0) & (name == "out"))  # of rows that see no key
                times = _rms(error) / (limits[name] * _rms(golden[name]))
                if bool(wrong.any()):
                    yield f"{name} is {float(x[wrong][0]):.3g}, not {float(golden[name][wrong][0]):.3g}", self.is_noted
                elif not times <= 1:
                    yield f"{name} errs by {_WITHIN * times:.3g} times what is permitted, or usual of the kernel", self.is_noted
                else:
                    continue
                break


@dataclass(frozen=True)
class Probed:
    """The outcome of a probe: it holds, fails, is noted not to hold, or is skipped because the kernel refuses its inputs."""

    name: str
    states: str
    outcome: str
    reason: str = ""

    @property
    def fails(self) -> bool:
        return self.outcome == "fails"


PROBES = (
    Probe("untouched", "A call changes neither its inputs nor what lies beside them.", check=_untouched),
    Probe("same bits", "Two calls return the same bits, in another stream too.", check=_same_bits),
    Probe(
        "layouts",
        "The result does not depend on the strides of the inputs.",
        places=(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), _inside),
    ),
    Probe("slices", "A head, a batch entry or a few queries alone give what they give together.", _slices, "grouped heads"),
    Probe("values of one", "With v = 1 the output is 1.", lambda x: [{"v": torch.ones_like(x["v"])}], only=FORWARD),
    Probe("permuted keys", "The order of the keys does not matter.", _permuted),
    Probe("shifted scores", "A constant added to the scores changes the LSE alone.", lambda x: _plus(x, _SHIFT), only=FORWARD),
    Probe(
        "far scores",
        f"Scores that jump by {_LARGE:g} do not overflow.",
        lambda x: _plus(x, torch.linspace(0, 1, x.sizes[1]).round() * (_LARGE / x.scale)),
        only=FORWARD,
    ),
    Probe("range of values", "Out is proportional to v, gradients are to dO, over the range of the format.", _scaled),
    Probe("every element", "No element of a million is far off.", check=_every_element),
    Probe("empty rows", "A row that sees no key is 0, its LSE -inf, and it adds nothing to gradients.", case="tall causal"),
    Probe("padding", "NaN and Inf in padded keys do not reach the result.", _padding, "key lengths"),
    Probe("unseen keys", "NaN in keys that no query sees does not reach the result.", _unseen, "window", is_noted=True),
    Probe(
        "other heads", "NaN in one head reaches no other.", lambda x: [{"k": filled(x["k"], 1, -1, math.nan)}], "grouped heads"
    ),
)
"""Every probe, in the order in which they run."""
