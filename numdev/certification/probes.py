"""Probes of structure: what must hold to the bit, or within the error that is permitted, whatever the inputs are.

A probe yields relations of outputs that must hold, or in words why something does not. Most take the inputs of the case `normal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from numdev.certification.accuracy import Known, Predictions
from numdev.certification.candidates import BACKWARD, FORWARD, OF_KEYS, Outputs, Pass
from numdev.certification.cases import CASES, Case, Tensors
from numdev.certification.kernel import Kernel
from numdev.errors import Unsupported

_GUARD = 64  # numbers beside an input, which a kernel must not write
_LARGE = 122.0  # by so much scores jump: an exponential of it overflows FP32
_MANY = Case("many rows", "single wrong elements", heads=16, kv_heads=16, queries=1024, keys=64)
_CASES = {case.name: case for case in CASES}
EXACT = 0.0


@dataclass(frozen=True)
class Relation:
    """Outputs that must equal others: `EXACT`, or within some times the RMSE that a case permits, by which each may err."""

    of: str
    outputs: Outputs
    expected: Outputs
    case: str = "normal"
    within: float = 2.0
    is_noted: bool = False  # if it does not hold, that is no failure


@dataclass(frozen=True)
class Probing:
    """A kernel, its seeds, and the results that several probes use."""

    kernel: Kernel
    predictions: Predictions
    seeds: range

    def known(self, name: str) -> Known:
        return self.predictions.of(_CASES[name], self.seeds)

    def on(self, name: str, **changed: Tensor) -> Outputs:
        """The outputs on a case, some of its inputs replaced."""
        return self.kernel.on(self.known(name).inputs, **changed)

    @cached_property
    def usual(self) -> Outputs:
        """The outputs on the case `normal`."""
        return self.on("normal")

    def broken(self, relation: Relation) -> str | None:
        """In which output, and how far, a relation does not hold."""
        for name, expected in relation.expected.items():
            x, known = relation.outputs[name], self.known(relation.case)
            if bool(((x == expected) | (x.isnan() & expected.isnan())).all()):
                continue
            if not bool(x.isfinite().all()):
                return f"{relation.of}: {name} is NaN or infinite"
            rmse = float((x.double() - expected.double()).pow(2).mean().sqrt())
            most = float((known.permitted[name] + known.floors[name])[:, 0].max())
            if relation.within == EXACT or not rmse <= relation.within * most:
                times = f", {rmse / most:.3g} times the permitted error" if most else ""
                return f"{relation.of}: {name} differs by {rmse:.2g} (RMS){times}"
        return None


Check = Callable[[Probing], Iterator[Relation | str]]


def _untouched(at: Probing) -> Iterator[str]:
    """Inputs, and what lies beside them in memory."""
    inputs, wholes, views = at.known("normal").inputs, Tensors(), Tensors()
    for name in at.kernel.takes:
        x = inputs.tensors[name]
        wholes[name] = torch.full((x.numel() + 2 * _GUARD,), 3.0, dtype=x.dtype, device=at.kernel.device)
        views[name] = wholes[name][_GUARD:-_GUARD].view(x.shape)
        views[name].copy_(x)
    before = {name: whole.clone() for name, whole in wholes.items()}
    at.kernel(views, inputs.mask, inputs.scale)
    for name, old in before.items():
        if not torch.equal(old, wholes[name]):
            own = torch.equal(old[_GUARD:-_GUARD], wholes[name][_GUARD:-_GUARD])
            yield f"the call {'writes beside' if own else 'changes'} {name}"


def _same_bits(at: Probing) -> Iterator[Relation]:
    """Also in another stream of a GPU. Gradients may be added by atomics, in any order, which is noted."""
    streams: list[AbstractContextManager[object]] = [nullcontext()]
    if at.kernel.device.type == "cuda":
        streams.append(torch.cuda.stream(torch.cuda.Stream()))
    for stream in streams:
        with stream:
            again = at.on("normal")
        yield Relation("a second call", again, at.usual, within=0.5 if at.predictions.of_pass is BACKWARD else EXACT)
        yield Relation("a second call", again, at.usual, within=EXACT, is_noted=True)


def _layouts(at: Probing) -> Iterator[Relation]:
    """Tokens before heads in memory, and tensors inside of larger ones."""
    inputs = at.known("normal").inputs

    def strided(x: Tensor) -> Tensor:
        wider = x.new_full((*x.shape[:2], x.shape[2] + 2, *(size + 8 for size in x.shape[3:])), math.nan)
        inner = wider[:, :, 1:-1, : x.shape[3]] if x.ndim == 4 else wider[:, :, 1:-1]
        return inner.copy_(x)

    def transposed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    for layout, change in (("with tokens before heads", transposed), ("with other strides", strided)):
        tensors = {name: change(inputs.tensors[name].to(at.kernel.device)) for name in at.kernel.takes}
        outputs = {name: x.cpu() for name, x in at.kernel(tensors, inputs.mask, inputs.scale).items()}
        yield Relation(f"inputs {layout}", outputs, at.usual)


def _slices(at: Probing) -> Iterator[Relation]:
    inputs = at.known("grouped heads").inputs
    whole, group = at.on("grouped heads"), inputs.group

    def sliced(tensors: Mapping[str, Tensor], batch: int | None, heads: int | None, rows: int | None) -> Tensors:
        """The first batch entries, heads of k with all of q that read them, and queries; gradients of keys sum over queries."""
        return {
            name: x[:batch, : heads and heads * (1 if name in OF_KEYS else group), : None if name in OF_KEYS else rows]
            for name, x in tensors.items()
            if not (rows and name in ("dk", "dv"))
        }

    parts = {"one head": (None, 1, None), "one batch entry": (1, None, None), "seven queries": (None, None, 7)}
    for name, part in parts.items():
        own = at.kernel.on(replace(inputs, tensors=sliced(inputs.tensors, *part)))
        yield Relation(f"{name} alone", own, sliced(whole, *part), "grouped heads")


def _values_of_one(at: Probing) -> Iterator[str]:
    out = at.on("normal", v=torch.ones_like(at.known("normal").inputs.tensors["v"]))["out"].double()
    # P is rounded to the format of the inputs, l is not: the mean of errors of up to u each; then the output is rounded.
    most, worst = 2 * at.predictions.policy.output.to.u, float((out - 1).abs().max())
    if not worst <= most:
        yield f"with v = 1 the output is off 1 by up to {worst:.2g}; permitted is {most:.2g}"


def _permuted_keys(at: Probing) -> Iterator[Relation]:
    x = at.known("normal").inputs.tensors
    order = torch.randperm(x["k"].shape[-2], generator=torch.Generator().manual_seed(at.seeds[0]))
    permuted = {name: each[:, :, order] if name in OF_KEYS else each for name, each in at.usual.items()}
    yield Relation("keys in another order", at.on("normal", k=x["k"][:, :, order], v=x["v"][:, :, order]), permuted)


def _range_of_values(at: Probing) -> Iterator[Relation]:
    """V, or dO, times a power of two, within the range of the format: the results are the same but for the factor.

    Gradients may be added by atomics, in any order.
    """
    fmt, name = at.predictions.policy.output.to, "do" if "do" in at.kernel.takes else "v"
    x, usual = at.known("normal").inputs.tensors[name], {each: y.double() for each, y in at.usual.items() if each != "lse"}
    for power in (20, -40) if fmt.emax > 15 else (8, -3):
        scaled = {each: y.double() * 2.0**-power for each, y in at.on("normal", **{name: x * 2.0**power}).items()}
        yield Relation(f"{name} times 2^{power}", scaled, usual, within=EXACT if fmt.emax > 15 and name == "v" else 2.0)


def _sums_of_groups(at: Probing) -> Iterator[Relation]:
    """Gradients of k and v that heads share are the sums of those of k and v that each head has for itself."""
    inputs = at.known("grouped heads").inputs
    own = {name: inputs.tensors[name].repeat_interleave(inputs.group, 1) for name in ("k", "v")}
    gradients = {name: x.float() for name, x in at.on("grouped heads", **own).items()}
    sums = {name: gradients[name].unflatten(1, (-1, inputs.group)).sum(2) for name in ("dk", "dv")}
    yield Relation("heads that share k and v", at.on("grouped heads"), sums, "grouped heads")


def _far_scores(at: Probing) -> Iterator[Relation]:
    """Scores that jump by more than an exponential in FP32 can hold: they need the running maximum."""
    inputs = at.known("normal").inputs
    q, k = inputs.tensors["q"].clone(), inputs.tensors["k"].clone()
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :, k.shape[-2] // 2 :, 0] = _LARGE / inputs.scale
    golden = at.predictions.of_pass.golden(replace(inputs, tensors=inputs.tensors | {"q": q, "k": k}))["out"]
    # Half of the keys are left, whose errors average less by the root of 2, at larger scores.
    yield Relation(f"scores that jump by {_LARGE:g}", at.on("normal", q=q, k=k), {"out": golden}, within=4.0)


def _every_element(at: Probing) -> Iterator[str]:
    known = at.predictions.of(_MANY, at.seeds[:1])
    for name, x in at.kernel.on(known.inputs).items():
        most = 2 * float(known.permitted[name][0, 1] + known.floors[name][0, 0])
        error = (x.double() - known.golden[name]).abs().nan_to_num(math.inf)
        if not float(error.max()) <= most:
            place = list(map(int, torch.unravel_index(error.argmax(), error.shape)))
            times = 2 * float(error.max()) / most
            yield f"of {error.numel()} elements of {name}, {place} errs by {times:.3g} times the largest permitted error"


def _empty_rows(at: Probing) -> Iterator[str]:
    queries, keys = at.known("tall causal").inputs.sizes
    for name, x in at.on("tall causal").items():
        empty = x[:, :, : queries - keys]
        if name in OF_KEYS and not bool(x.isfinite().all()):
            yield f"rows that see no key make {name} infinite or NaN"
        elif name == "lse" and not bool(empty.isneginf().all()):
            yield "the LSE of rows that see no key is not -inf"
        elif name in ("out", "dq") and not bool((empty == 0).all()):
            yield f"{name} of rows that see no key is {'NaN' if bool(empty.isnan().any()) else 'a number'}, not 0"


def _unread(at: Probing, case: str, unread: Tensor, values: tuple[float, ...], keys: str) -> Iterator[Relation]:
    """Values that are not finite in keys that no query reads."""
    x, clean = at.known(case).inputs.tensors, at.on(case)
    for value in values:
        changed = {name: x[name].masked_fill(unread, value) for name in "kv"}
        yield Relation(f"{value} in {keys}", at.on(case, **changed), clean, case, EXACT)


def _padding(at: Probing) -> Iterator[Relation]:
    inputs = at.known("key lengths").inputs
    lengths = torch.tensor(inputs.mask.key_lengths)[:, None, None, None]
    padding = torch.arange(inputs.sizes[1])[:, None] >= lengths
    return _unread(at, "key lengths", padding, (math.nan, math.inf), "padded keys")


def _unseen_keys(at: Probing) -> Iterator[Relation]:
    """Keys before the window of the first query."""
    inputs = at.known("window").inputs
    queries, keys = inputs.sizes
    unseen = torch.arange(keys)[:, None] <= keys - queries - (inputs.mask.window or 0)
    return _unread(at, "window", unseen, (math.nan,), "keys that no query sees")


def _other_heads(at: Probing) -> Iterator[Relation | str]:
    inputs = at.known("grouped heads").inputs
    k = inputs.tensors["k"].clone()
    k[:, -1] = math.nan
    usual, outputs = at.on("grouped heads"), at.on("grouped heads", k=k)
    own = {name: 1 if name in OF_KEYS else inputs.group for name in outputs}
    others, expected = ({name: x[:, : -own[name]] for name, x in each.items()} for each in (outputs, usual))
    yield Relation("NaN in one head", others, expected, "grouped heads", EXACT)
    if not all(bool(x[:, -own[name] :].isnan().all()) for name, x in outputs.items() if name in ("out", "dq")):
        yield "NaN in k gives results that are not NaN"


@dataclass(frozen=True)
class Probe:
    """A property with the sentence that states it; a kernel may lack one that is only noted. `only` is the pass that has it."""

    name: str
    states: str
    check: Check
    is_noted: bool = False
    only: Pass | None = None


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


def probed(probe: Probe, at: Probing) -> Probed:
    """Check a probe."""
    try:
        outcome, reason = "holds", ""
        for each in probe.check(at):
            broken, is_noted = (each, False) if isinstance(each, str) else (at.broken(each), each.is_noted)
            if broken and outcome != "fails":
                outcome, reason = ("noted" if probe.is_noted or is_noted else "fails"), broken
    except Unsupported as error:
        return Probed(probe.name, probe.states, "skipped", str(error))
    return Probed(probe.name, probe.states, outcome, reason)


PROBES = (
    Probe("untouched", "A call changes neither its inputs nor what lies beside them.", _untouched),
    Probe("same bits", "Two calls return the same bits, in another stream too.", _same_bits),
    Probe("layouts", "The result does not depend on the strides of the inputs.", _layouts),
    Probe("slices", "A head, a batch entry or a few queries alone give what they give together.", _slices),
    Probe("values of one", "With v = 1 the output is 1.", _values_of_one, only=FORWARD),
    Probe("permuted keys", "The order of the keys does not matter.", _permuted_keys),
    Probe("range of values", "Out is proportional to v, gradients are to dO, over the range of the format.", _range_of_values),
    Probe("grouped sums", "Gradients of k and v are summed over the heads that share them.", _sums_of_groups, only=BACKWARD),
    Probe("far scores", "Scores that jump by 122 do not overflow.", _far_scores, only=FORWARD),
    Probe("every element", "No element of a million is far off.", _every_element),
    Probe("empty rows", "A row that sees no key is 0, its LSE -inf, and it adds nothing to gradients.", _empty_rows),
    Probe("padding", "NaN and Inf in padded keys do not reach the result.", _padding),
    Probe("unseen keys", "NaN in keys that no query sees does not reach the result.", _unseen_keys, is_noted=True),
    Probe("other heads", "NaN in one head reaches no other.", _other_heads),
)
"""Every probe, in the order in which they run."""
