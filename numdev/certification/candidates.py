"""What a kernel may do, and what faulty kernels do: candidates, each of which predicts outputs element by element.

A candidate is the declared policy with one thing changed: a step in another format, which tiled attention itself predicts; a
rounding where kernels store a result, and not after every operation; or a fault of structure, such as a tile left out. The last
two are simulated in FP64 (`Simulation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from numdev.arithmetic.products import Dot
from numdev.arithmetic.rounding import Cast, Overflow, Rounding
from numdev.attention.base import Saved
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import EXP2_MINIMAX, DeltaForm, Exponential, OnlineSoftmax, Recompute, ScaleOn, SumOver
from numdev.attention.steps import LOG2_E
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.certification.cases import Inputs

Outputs = dict[str, Tensor]
OF_KEYS = ("k", "v", "dk", "dv")
"""Tensors that have the heads and the tokens of k; others have those of q."""
NEVER = float("-inf")
_RECOMPUTE = Recompute(exponential=Exponential.EXP2)
_NAMES = {E4M3FN: "E4M3", E5M2: "E5M2"}
_NEVER_RISES = 1e6
_LATE = 4  # of the tiles that a fault can be in, the first ones
_SPLITS = (2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """One way in which a kernel may compute.

    Attributes:
        name: for programs, such as `row_sum=bf16`; before = stands the step.
        title: for people, to follow "errs as" and "does": `the row sum in BF16`.
        steps: what is rounded to another format. A step of two words, such as `row_sum stored`, is rounded when it is stored.
        recurrence: the recurrence, or what a backward pass recomputes, where it is another one.
        fault: of structure.
        permitted: whether a kernel of the declared policy may compute so.
    """

    name: str
    title: str
    steps: Mapping[str, Format | Cast] = field(default_factory=dict)
    recurrence: Any = None
    fault: str = ""
    permitted: bool = False

    @property
    def is_simulated(self) -> bool:
        return bool(self.fault) or any(" " in step for step in self.steps)

    def __and__(self, other: Candidate) -> Candidate | None:
        """Both changes in one candidate; None where they are of one step, or cannot be had together."""
        one, two = ({step.partition(" ")[0] for step in each.steps} for each in (self, other))
        if one & two or (self.recurrence and other.recurrence) or (self.fault and other.fault):
            return None
        name, title = f"{self.name} and {other.name}", f"{self.title} and {other.title}"
        both = {**self.steps, **other.steps}
        return Candidate(name, title, both, self.recurrence or other.recurrence, self.fault or other.fault)


@dataclass(frozen=True)
class Simulation:
    """A pass in FP64 that rounds some results where kernels store them, and nowhere else, and may have a fault of structure.

    Attributes:
        policy: what enters the products, and the output, are rounded as it says.
        steps: what else is rounded when it is stored; see `Candidate`.
        fault: of structure; behind # stands the tile in which it is.
        recurrence: the exponential and the terms of the row sum, where they are other ones.
    """

    inputs: Inputs
    policy: Any
    tiling: Tiling
    steps: Mapping[str, Format | Cast] = field(default_factory=dict)
    fault: str = ""
    recurrence: Any = None

    def _at(self, step: str, x: Tensor) -> Tensor:
        fmt = self.steps.get(step, self.steps.get(step.partition(" ")[0]))
        return x if fmt is None else rounded(x, Cast(fmt) if isinstance(fmt, Format) else fmt)

    def _at_base_2(self, step: str, x: Tensor) -> Tensor:
        """x in base e, rounded as it is in base 2."""
        return self._at(step, x * LOG2_E) / LOG2_E

    def _exp(self, x: Tensor) -> Tensor:
        return torch.exp(x) if self.recurrence is None else self.recurrence.exp(x * self.recurrence.log_scale)

    def _is(self, fault: str, tile: int | None = None) -> bool:
        return self.fault == (fault if tile is None else f"{fault}#{tile}")

    @property
    def _heads(self) -> Tensor:
        """The head of k and v that each head of q reads."""
        heads = torch.arange(self.inputs.tensors["q"].shape[1])
        return heads % self.inputs.tensors["k"].shape[1] if self._is("heads interleaved") else heads // self.inputs.group

    def _of_keys(self, name: str) -> Tensor:
        """k or v of each head of q."""
        x = self.inputs.tensors[name].double()
        return (x if self.fault in ("lengths ignored", "mask ignored") else self.inputs.mask.without_padding(x))[:, self._heads]

    def seen(self) -> Tensor:
        """Whether each query sees each key `[batch or 1, 1, queries, keys]`: as the mask says, or with limits that are off."""
        mask, (queries, keys) = self.inputs.mask, self.inputs.sizes
        position, key = torch.arange(queries)[:, None] + (keys - queries), torch.arange(keys)
        if self._is("limit=top left"):
            position = position - (keys - queries)
        off = {fault: change for fault in ("limit", "window") for change in (-1, 1) if self._is(f"{fault}={change:+d}")}
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        if self._is("mask ignored"):
            return seen
        if mask.causal and not self._is("limit=none"):
            seen = seen & (key <= position + off.get("limit", 0))
        if mask.window is not None and not self._is("window=none"):
            seen = seen & ((position - key).abs() < mask.window + off.get("window", 0))
        if mask.key_lengths is not None and not self.fault.startswith("lengths"):
            seen = seen & (key < torch.tensor(mask.key_lengths)[:, None, None, None])
        return seen & (key < keys // self.tiling.bc * self.tiling.bc) if self._is("last tile dropped") else seen

    def forward(self) -> Outputs:
        """Out and LSE; splits are combined in FP64."""
        q, k, v, seen = self.inputs.tensors["q"].double(), self._of_keys("k"), self._of_keys("v"), self.seen()
        tilings = [[(0, k.shape[-2])]] if self._is("P divided") else self.tiling.key_tiles(k.shape[-2])
        parts = [self._split(q, k, v, seen, tiles) for tiles in tilings if tiles]
        outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
        outs, lses = self._at("splits O", outs), self._at("splits LSE", lses)
        lse = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - lse.masked_fill(lse == NEVER, 0.0))
        out = outs.mean(0) if self.fault.startswith("splits") else (weights * outs).sum(0)
        if self._is("last head zero"):
            out[:, -1] = 0.0
        lse = self._at("lse stored", lse) * {"lse base 2": LOG2_E, "lse scaled": 1 / LOG2_E}.get(self.fault, 1.0)
        return {"out": rounded(self._at("output through", out), self.policy.output), "lse": lse.squeeze(-1)}

    def _split(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, tiles: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """O / l and LSE over some tiles."""
        m, row_sum = q.new_full((*q.shape[:-1], 1), NEVER), q.new_zeros(*q.shape[:-1], 1)
        o = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for place, (start, stop) in enumerate(tiles):
            s = self._at("scores stored", q @ k[:, :, start:stop].mT) * self.inputs.scale
            s = self._at_base_2("scores in base 2", self._at("scores scaled", s)).masked_fill(~seen[..., start:stop], NEVER)
            m_next = torch.maximum(m, self._at("maximum stored", s.amax(-1, keepdim=True)))
            shift = m_next.masked_fill(m_next == NEVER, 0.0)
            alpha = self._at("rescale stored", self._exp(m - shift))
            below = self._at_base_2("exponential of base-2 arguments", self._at("exponential of arguments", s - shift))
            p = self._at("exponential stored", self._exp(below))
            divisor = p.sum(-1, keepdim=True).clamp(min=1e-300) if self._is("P divided") else 1.0
            stored = rounded(p / divisor, self.steps.get("probabilities", self.policy.probabilities)) * divisor
            over_stored = self.recurrence is not None and self.recurrence.sum_over is SumOver.PROBABILITIES
            new = self._at("row_sum of tiles", (stored if over_stored else p).sum(-1, keepdim=True))
            if self._is("padding counted") and stop - start < self.tiling.bc:
                new += (self.tiling.bc - stop + start) * torch.exp(-shift)
            early = int(self._is("v shifted", place) and start > 0)
            product = stored @ v[:, :, start - early : stop - early]
            kept = row_sum if self._is("rescale of l missed", place) else alpha * row_sum
            row_sum = self._at("row_sum stored", kept + new)
            o = o if self._is("rescale missed", place) else self._at("accumulator rescaled", self._at("rescale of O", alpha) * o)
            o, m = self._at("accumulator stored", o + product), m_next
            if "accumulator divided" in self.steps:
                o = self._at("accumulator divided", o / row_sum) * row_sum
        lse, row_sum = m.masked_fill(m == NEVER, 0.0) + row_sum.log(), row_sum.masked_fill(row_sum == 0, 1.0)
        if "division by reciprocals" in self.steps:
            return o * self._at("division by reciprocals", 1 / row_sum), lse
        if "division stored" not in self.steps:
            return o / row_sum, lse
        divided = self._at("division stored", o) * self._at("division stored", 1 / row_sum)
        return self._at("division stored", divided), lse

    def backward(self) -> Outputs:
        """The gradients, from the O and the LSE that were saved."""
        x = {name: each.double() for name, each in self.inputs.tensors.items()}
        q, do, k, v, seen = x["q"], x["do"], self._of_keys("k"), self._of_keys("v"), self.seen()
        lse = x["lse"][..., None].masked_fill(x["lse"][..., None] == NEVER, -NEVER)  # whose exponentials are 0
        lse = lse / math.log(2) if self._is("lse in base 2") else lse
        delta = self._at("delta stored", (do * self._at("output stored", x["out"])).sum(-1, keepdim=True))
        delta = delta * {"delta omitted": 0.0, "delta added": -1.0}.get(self.fault, 1.0)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        rows = replace(self.tiling, bc=self.tiling.br).key_tiles(q.shape[-2])[0]
        for place, (start, stop) in enumerate(self.tiling.key_tiles(k.shape[-2])[0]):
            keys = (..., slice(start, stop), slice(None))
            for turn, (first, last) in enumerate(rows):
                here = (..., slice(first, last), slice(None))
                s = self._at("scores stored", q[here] @ k[keys].mT) * self.inputs.scale
                p = self._at("exponential stored", torch.exp(s - lse[here])).masked_fill(~seen[..., first:last, start:stop], 0.0)
                dp = self._at("dp stored", do[here] @ v[keys].mT)
                ds = rounded(p * (dp - delta[here]), self.policy.ds)
                p = rounded(p, self.policy.probabilities)
                for name, total, at, product, dropped, tile in (
                    ("dq_sum", dq, here, ds @ k[keys], "keys dropped", place),
                    ("dk_sum", dk, keys, ds.mT @ q[here], "queries dropped", turn),
                    ("dv_sum", dv, keys, p.mT @ do[here], "queries dropped", turn),
                ):
                    if not self._is(dropped, tile):
                        kept = 0.0 if self._is(f"{name} overwritten") else total[at]
                        total[at] = self._at(f"{name} stored", kept + product)
        factors = {"unscaled": 1.0, "scaled twice": self.inputs.scale**2}
        dq, dk = (x * factors.get(self.fault.removeprefix(name), self.inputs.scale) for name, x in (("dq ", dq), ("dk ", dk)))
        dk, dv = (self._of_groups(x) for x in ((dv, dk) if self._is("dk and dv exchanged") else (dk, dv)))
        gradients = {"dq": dq, "dk": dk, "dv": dv}
        return {name: rounded(gradient, self.policy.output) for name, gradient in gradients.items()}

    def _of_groups(self, gradient: Tensor) -> Tensor:
        """The sums over the heads that share one of k and v."""
        gradient, total = self._at("heads stored", gradient), torch.zeros_like(gradient[:, :: self.inputs.group])
        heads = torch.arange(0, gradient.shape[1], self.inputs.group if self._is("heads not summed") else 1)
        return total.index_add(1, self._heads[heads], gradient[:, heads])


def rounded(x: Tensor, cast: Any) -> Tensor:
    """x in the format of a cast; -inf stays."""
    never = x.isneginf()
    result: Tensor = cast(x.masked_fill(never, 0.0)).to(x.dtype).masked_fill(never, NEVER)
    return result


PLAIN = OnlineSoftmax(exp=Exponential.EXP2)
LAZY = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)
DECLARED = Candidate("declared", "the declared policy", permitted=True)
LAZILY = Candidate("rescale_threshold=8", "rescaling only when a maximum rises by more than 8", recurrence=LAZY, permitted=True)
DIVIDED = Candidate("probabilities divided", "P divided by l before it is rounded", fault="P divided", permitted=True)
_FORWARD_STEPS = {
    "scores": "scores in {}",
    "exponential": "exponentials in {}",
    "rescale": "the rescale factor in {}",
    "row_sum": "the row sum in {}",
    "probabilities": "P in {}",
    "values": "the product P V in {}",
    "accumulator": "the accumulator in {}",
    "scores stored": "scores stored in {}",
    "scores scaled": "scores, scaled, stored in {}",
    "scores in base 2": "scores in base 2 stored in {}",
    "exponential of arguments": "S - m in {}",
    "exponential of base-2 arguments": "S - m in base 2 in {}",
    "maximum stored": "the running maximum in {}",
    "exponential stored": "exponentials stored in {}",
    "rescale stored": "alpha stored in {}",
    "rescale of O": "alpha of the accumulator stored in {}",
    "row_sum of tiles": "the row sum of each tile in {}",
    "row_sum stored": "the row sum stored in {} after each tile",
    "accumulator stored": "the accumulator stored in {} after each tile",
    "accumulator rescaled": "the accumulator rescaled in {}",
    "accumulator divided": "the accumulator, divided in every tile, stored in {}",
    "division stored": "the division by l in {}",
    "division by reciprocals": "1 / l in {}",
    "splits O": "the outputs of splits of the keys in {}",
    "splits LSE": "the LSE of splits of the keys in {}",
    "lse stored": "an LSE in {}",
    "output through": "an output through {}",
}
_MASK_FAULTS = {
    "limit=+1": "a causal limit of one key too many",
    "limit=-1": "a causal limit of one key too few",
    "limit=top left": "a causal limit aligned at the first key, not at the last",
    "limit=none": "a causal limit that is ignored",
    "mask ignored": "every mask ignored",
    "window=+1": "a window of one key too many",
    "window=-1": "a window of one key too few",
    "window=none": "a window that is ignored",
    "lengths ignored": "padded keys that are read",
    "lengths as zeros": "padded keys that count as zeros",
    "heads interleaved": "heads of q mapped to heads of k and v in turn",
    "last tile dropped": "a ragged last tile left out",
}
_FORWARD_FAULTS = _MASK_FAULTS | {
    "lse base 2": "an LSE in base 2",
    "lse scaled": "an LSE times log 2",
    "last head zero": "a last head that is not computed",
    "padding counted": "padding of the last tile counted in the row sum",
    "v shifted": "v of one tile read a key too early",
    "rescale missed": "one rescale of the accumulator missed",
    "rescale of l missed": "one rescale of the row sum missed",
    "splits unweighed": "splits of the keys averaged without their LSE",
}
_BACKWARD_STEPS = {
    "scores": "S, computed again, in {}",
    "exponential": "P, computed again, in {}",
    "dp": "dP in {}",
    "delta": "delta in {}",
    "difference": "P (dP - delta) in {}",
    "dq": "the product dS K in {}",
    "dk": "the product dS^T Q in {}",
    "dv": "the product P^T dO in {}",
    "dq_sum": "the running sum of dq in {}",
    "dk_sum": "the running sum of dk in {}",
    "dv_sum": "the running sum of dv in {}",
    "scores stored": "S, computed again, stored in {}",
    "exponential stored": "P, computed again, stored in {}",
    "dp stored": "dP stored in {}",
    "delta stored": "delta stored in {}",
    "output stored": "a delta of O in {}",
    "heads stored": "dk and dv of each head in {} before they are summed",
}
_BACKWARD_FAULTS = _MASK_FAULTS | {
    "delta omitted": "dS without delta",
    "delta added": "delta added to dP",
    "lse in base 2": "an LSE that is taken for one in base 2",
    "keys dropped": "a tile of keys left out of dq",
    "queries dropped": "a tile of queries left out of dk and dv",
    "dq_sum overwritten": "dq of the last tile of keys alone",
    "dk_sum overwritten": "dk of the last tile of queries alone",
    "dv_sum overwritten": "dv of the last tile of queries alone",
    "dq unscaled": "dq without the scale",
    "dk unscaled": "dk without the scale",
    "dq scaled twice": "dq with the scale twice",
    "dk scaled twice": "dk with the scale twice",
    "dk and dv exchanged": "dk and dv exchanged",
    "heads not summed": "dk and dv of one head of each group alone",
}


def in_narrower_formats(declared: Any, titles: Mapping[str, str]) -> Iterator[Candidate]:
    """Every step of a policy in every narrower format of 16 bits, in every operation or where it is stored."""
    for key, title in titles.items():
        step, _, how = key.partition(" ")
        own = getattr(declared, step, None) or Cast(FP32)
        cast = own.accumulate if isinstance(own, Dot) else own
        for fmt in dict.fromkeys((FP16, BF16, declared.output.to) if how else (FP16, BF16)):
            if fmt.bits <= 16 and fmt.precision < cast.to.precision and (how or fmt.bits <= cast.to.bits):
                yield Candidate(f"{step}={fmt} {how}".strip(), title.format(name_of(fmt)), {key: fmt})


def _forward_catalogue(declared: Precision) -> Iterator[Candidate]:
    yield from in_narrower_formats(declared, _FORWARD_STEPS)
    own = declared.probabilities.to  # type: ignore[union-attr]
    for fmt in (FP16, FP32):  # P in a wider format errs no more
        if own.bits == 16 and fmt.precision > own.precision:
            yield Candidate(f"probabilities={fmt}", f"P in {name_of(fmt)}", {"probabilities": fmt}, permitted=True)
    yield DIVIDED
    yield from _truncated(declared, {"probabilities": "P", "output": "an output"})
    for fmt in (E4M3FN, E5M2):
        steps = {"probabilities": _saturating(fmt)}
        yield Candidate(f"probabilities={fmt}", f"P in {name_of(fmt)}", steps)
        for factor in (256.0, 448.0, 1024.0):
            title = f"P times {factor:g} in {name_of(fmt)}"
            yield Candidate(f"probabilities={fmt}*{factor:g}", title, steps, replace(PLAIN, p_scale=factor))
    for degree in (2, 3, 4):
        yield from by_polynomial(f"poly{degree}", EXP2_MINIMAX[degree])
    over = replace(PLAIN, sum_over=SumOver.PROBABILITIES)
    yield Candidate("sum_over=probabilities", "a row sum over the rounded P", recurrence=over)
    for base in (Exponential.EXP2, Exponential.EXP):
        on_q = OnlineSoftmax(exp=base, scale_on=ScaleOn.QUERIES)
        yield Candidate(f"scale_on=queries {base}", "a scale multiplied into q, which is then rounded", recurrence=on_q)
    stale = replace(PLAIN, rescale_threshold=_NEVER_RISES)
    yield Candidate("maximum stale", "a maximum that stays that of the first tile", recurrence=stale)


def _backward_catalogue(declared: BackwardPrecision) -> Iterator[Candidate]:
    yield from in_narrower_formats(declared, _BACKWARD_STEPS)
    for fmt in (FP16, BF16):
        for name, title in {"sum": "the running sums of dq, dk and dv", "": "the products of dq, dk and dv"}.items():
            steps = {f"{each}_{name}".rstrip("_"): fmt for each in ("dq", "dk", "dv")}
            if fmt.precision < declared.dq_sum.to.precision:
                yield Candidate(f"{name or 'product'}s={fmt}", f"{title} in {name_of(fmt)}", steps)
    for step, title in (("probabilities", "P"), ("ds", "dS")):
        own = getattr(declared, step).to
        for fmt in (E4M3FN, E5M2, BF16, FP16, FP32):
            if fmt != own:
                is_permitted = fmt.precision > own.precision
                cast = _saturating(fmt) if fmt.bits == 8 else fmt
                yield Candidate(f"{step}={fmt}", f"{title} in {name_of(fmt)}", {step: cast}, permitted=is_permitted)
    yield from _truncated(declared, {"probabilities": "P", "ds": "dS", "output": "gradients"})
    for degree in (2, 3, 4):
        recompute = Recompute(exponential=Exponential.polynomial(EXP2_MINIMAX[degree]))
        yield Candidate(f"exp=poly{degree}", f"an exponential by a polynomial of degree {degree}", recurrence=recompute)
    of_p = replace(_RECOMPUTE, delta=DeltaForm.PROBABILITIES)
    yield Candidate("delta=probabilities", "delta as the row sum of dP times P", recurrence=of_p, permitted=True)


def _saturating(fmt: Format) -> Cast:
    return Cast(fmt, overflow=Overflow.SATURATE)


def by_polynomial(name: str, coefficients: tuple[float, ...]) -> Iterator[Candidate]:
    """Exponentials by a polynomial, of P alone or of alpha too."""
    exp = OnlineSoftmax(exp=Exponential.polynomial(coefficients))
    title = f"an exponential by a polynomial of degree {len(coefficients) - 1}"
    yield Candidate(f"exp={name}", title, recurrence=exp)
    yield Candidate(f"exp={name} of alpha too", f"{title}, of alpha too", recurrence=exp, fault="alpha approximated")


def _truncated(declared: Any, titles: Mapping[str, str]) -> Iterator[Candidate]:
    """What is stored, rounded toward zero."""
    for step, title in titles.items():
        cast = Cast(getattr(declared, step).to, Rounding.TOWARD_ZERO)
        yield Candidate(f"{step}={cast.to} truncated", f"{title} truncated to {name_of(cast.to)}", {step: cast})


def _forward_faults(inputs: Inputs, tiling: Tiling) -> Iterator[str]:
    """The faults that change the result of these inputs in these tiles; behind # stands the tile in which a fault is."""
    keys, bc = inputs.sizes[1], tiling.bc
    yield from _mask_faults(inputs, tiling)
    yield from ("lse base 2", "lse scaled", "last head zero", *(("padding counted",) if keys % bc else ()))
    for place in range(1, min(_LATE, math.ceil(keys / bc))):
        yield from (f"{fault}#{place}" for fault in ("v shifted", "rescale missed", "rescale of l missed"))
    if tiling.order is Order.FORWARD and tiling.splits == 1:
        yield from (f"splits unweighed#{splits}" for splits in _SPLITS if keys > bc * splits)


def _backward_faults(inputs: Inputs, tiling: Tiling) -> Iterator[str]:
    yield from _mask_faults(inputs, tiling)
    yield from ("delta omitted", "delta added", "lse in base 2", "dk and dv exchanged")
    yield from (f"{name} {fault}" for name in ("dq", "dk") for fault in ("unscaled", "scaled twice"))
    if inputs.group > 1:
        yield "heads not summed"
    for size, fault, sums in zip(inputs.sizes, ("queries dropped", "keys dropped"), (("dk", "dv"), ("dq",)), strict=True):
        tiles = math.ceil(size / tiling.bc)
        if tiles > 1:
            yield from (f"{fault}#{place}" for place in {*range(min(_LATE, tiles)), tiles - 1})
            yield from (f"{name}_sum overwritten" for name in sums)


def _mask_faults(inputs: Inputs, tiling: Tiling) -> Iterator[str]:
    """Those of limits, lengths, heads and a last tile, which both passes have."""
    mask, (queries, keys) = inputs.mask, inputs.sizes
    if not mask.is_none:
        yield "mask ignored"
    if mask.causal:
        yield from ("limit=+1", "limit=-1", "limit=none", *(("limit=top left",) if queries != keys else ()))
    if mask.window is not None:
        yield from ("window=+1", "window=-1", "window=none")
    if mask.key_lengths is not None:
        yield from ("lengths ignored", "lengths as zeros")
    if 1 < inputs.group < inputs.tensors["q"].shape[1]:
        yield "heads interleaved"
    if keys % tiling.bc and keys > tiling.bc:
        yield "last tile dropped"


def _forward_golden(inputs: Inputs) -> Outputs:
    return Exact()(*inputs.qkv, inputs.mask, inputs.scale).tensors()


def _forward_tiled(inputs: Inputs, policy: Precision, tiling: Tiling, softmax: OnlineSoftmax | None) -> Outputs:
    q, k, v = (x.to(policy.carrier) for x in inputs.qkv)
    return Tiled(policy, tiling, softmax or PLAIN, count=False)(q, k, v, inputs.mask, inputs.scale).tensors()


def _backward_golden(inputs: Inputs) -> Outputs:
    return ExactBackward()(*inputs.qkv, inputs.tensors["do"], inputs.mask, inputs.scale).tensors()


def _backward_tiled(inputs: Inputs, policy: BackwardPrecision, tiling: Tiling, recompute: Recompute | None) -> Outputs:
    q, k, v, do, out, lse = (inputs.tensors[name].to(policy.carrier) for name in ("q", "k", "v", "do", "out", "lse"))
    run = TiledBackward(Exact(), policy, tiling, recompute or _RECOMPUTE, count=False)
    return run.backward(q, k, v, do, Saved(out, lse), inputs.mask, inputs.scale).tensors()


def _with_saved(inputs: Inputs, precision: str) -> Inputs:
    """With the O and the LSE that a forward pass of the declared policy saves."""
    policy, tiling = Precision.parse(precision), Tiling()
    saved = _forward_tiled(inputs, policy, tiling, None)
    out = saved["out"].to(inputs.tensors["q"].dtype)
    return replace(inputs, tensors=inputs.tensors | {"out": out, "lse": saved["lse"].float()})


def name_of(fmt: Format) -> str:
    return _NAMES.get(fmt, str(fmt).upper())


Layouts = dict[str, tuple[Tiling, Candidate]]
TILES = tuple(range(16, 257, 16))
"""Sizes Bc by which the tiles of a kernel are looked for."""
_ORDERS = (Order.FORWARD, Order.REVERSE)


def _layouts(sizes: tuple[int, ...], *, lazily: bool = False) -> Layouts:
    tilings = [Tiling(br=bc, bc=bc, order=order) for bc in sizes for order in _ORDERS]
    return {layout(each, lazily=lazily): (each, LAZILY if lazily else DECLARED) for each in tilings}


def layout(tiling: Tiling, *, lazily: bool = False) -> str:
    """Tiles in words: `tiles of 128 keys, reverse`."""
    order = tiling.order.value if tiling.splits == 1 else f"{tiling.splits} splits"
    return f"tiles of {tiling.bc} keys, {order}{', lazy rescales' if lazily else ''}"


_USUAL = (32, 64, 128)
_SPLIT_TILINGS = [Tiling(bc=bc, splits=splits) for bc in TILES[1:8] for splits in (2, 3, 4, 5, 6, 8)]
_SPLIT: Layouts = {layout(tiling): (tiling, DECLARED) for tiling in _SPLIT_TILINGS}


@dataclass(frozen=True)
class Pass:
    """The forward or the backward pass: what is exact, what kernels of a policy return, and how kernels err.

    Attributes:
        outputs: by name, the first of them primary.
        groups: of outputs whose tiles are the same.
        prepare: adds to the inputs of a case what the pass reads beside them.
        usual: tiles of the kernels that ship; their largest error is what a policy permits.
        layouts: tiles by which those of a kernel are looked for.
        searched: tiles in which candidates are tried where these show nothing.
    """

    outputs: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    policy: Callable[[str], Any]
    prepare: Callable[[Inputs, str], Inputs]
    golden: Callable[[Inputs], Outputs]
    tiled: Callable[[Inputs, Any, Tiling, Any], Outputs]
    simulated: Callable[[Simulation], Outputs]
    catalogue: Callable[[Any], Iterator[Candidate]]
    faults: Callable[[Inputs, Tiling], Iterator[str]]
    titles: Mapping[str, str]
    usual: Layouts
    layouts: Layouts
    searched: Layouts

    def predict(self, candidate: Candidate, inputs: Inputs, policy: Any, tiling: Tiling) -> Outputs:
        """The outputs of a candidate in some tiles, as they are stored: in FP32, which holds every output of 16 bits, and LSE."""
        if candidate.fault.startswith("splits"):
            tiling = replace(tiling, splits=int(candidate.fault.partition("#")[2]))
        if candidate.is_simulated:
            outputs = self.simulated(Simulation(inputs, policy, tiling, candidate.steps, candidate.fault, candidate.recurrence))
        else:
            outputs = self.tiled(inputs, policy.with_step(**candidate.steps), tiling, candidate.recurrence)
        return {name: outputs[name].float() for name in self.outputs}


FORWARD = Pass(
    outputs=("out", "lse"),
    groups=(("out", "lse"),),
    policy=Precision.parse,
    prepare=lambda inputs, precision: inputs,
    golden=_forward_golden,
    tiled=_forward_tiled,
    simulated=Simulation.forward,
    catalogue=_forward_catalogue,
    faults=_forward_faults,
    titles=_FORWARD_FAULTS,
    usual=_layouts(_USUAL)
    | _layouts(_USUAL, lazily=True)
    | {name: _SPLIT[name] for name in ("tiles of 64 keys, 4 splits",)}
    | {"whole rows": (Tiling(), DIVIDED)},
    layouts=_layouts(TILES) | _layouts(TILES, lazily=True) | _SPLIT,
    searched=_layouts((32, 64, 96, 128)),
)
BACKWARD = Pass(
    outputs=("dq", "dk", "dv"),
    groups=(("dq",), ("dk", "dv")),
    policy=BackwardPrecision.parse,
    prepare=_with_saved,
    golden=_backward_golden,
    tiled=_backward_tiled,
    simulated=Simulation.backward,
    catalogue=_backward_catalogue,
    faults=_backward_faults,
    titles=_BACKWARD_FAULTS,
    usual=_layouts(_USUAL),
    layouts=_layouts((*TILES, 512)),
    searched=_layouts((64, 256)),
)
