"""What a kernel may do, and what faulty kernels do: candidates, each of which predicts outputs element by element.

A candidate is the declared policy with one thing changed. Three kinds of change are predicted: a step in another format, by tiled
attention itself; a rounding in another place than a policy has it, since kernels round when they store and a policy after every
operation (`Place`); and a fault of structure, such as a tile left out, by exact attention of what the faulty kernel computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from numdev.arithmetic.products import Dot
from numdev.arithmetic.rounding import Cast, Overflow
from numdev.attention.precision import Precision
from numdev.attention.softmax import EXP2_MINIMAX, Exponential, OnlineSoftmax, ScaleOn, SumOver
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.certification.cases import Inputs

Outputs = dict[str, Tensor]
_NEVER = float("-inf")
_NARROW = (FP16, BF16, E4M3FN, E5M2)
_STEPS = {
    "scores": "scores",
    "exponential": "exponentials",
    "rescale": "the rescale factor",
    "row_sum": "the row sum",
    "probabilities": "P",
    "values": "the product P V",
    "accumulator": "the accumulator",
}
PLAIN = OnlineSoftmax(exp=Exponential.EXP2)
LAZY = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)
DECLARED = "declared"
_NEVER_RISES = 1e6


@dataclass(frozen=True)
class Place:
    """A forward pass in FP64 that rounds some results where kernels store them, and nowhere else.

    Attributes:
        step: what is rounded: `scores` before their scaling, `maximum`, `rescale` (alpha alone), `row_sum` and `accumulator` once
            a tile, `kept` (the accumulator after its rescaling, before the product is added), `division` (by the reciprocal).
        fmt: to which format.
    """

    step: str
    fmt: Format

    def __call__(self, inputs: Inputs, policy: Precision, tiling: Tiling) -> Outputs:
        """Out and LSE of the inputs. P is rounded as the policy says; splits are combined in FP64."""
        (q, k, v), mask = (x.double() for x in inputs.qkv), inputs.mask
        heads = q.shape[1] // k.shape[1]
        k, v = (mask.without_padding(x).repeat_interleave(heads, 1) for x in (k, v))
        parts = [self._split((q, k, v), inputs, policy, tiles) for tiles in tiling.key_tiles(k.shape[-2]) if tiles]
        lse = torch.logsumexp(torch.stack([each for _, each in parts]), 0)
        shift = lse.masked_fill(lse == _NEVER, 0.0)
        out = sum((torch.exp(own - shift) * out for out, own in parts), torch.zeros_like(parts[0][0]))
        return {"out": _rounded(out, policy.output), "lse": lse.squeeze(-1)}

    def _split(
        self, qkv: tuple[Tensor, Tensor, Tensor], inputs: Inputs, policy: Precision, tiles: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """O / l and LSE over some tiles."""
        q, k, v = qkv
        queries, keys = q.shape[-2], k.shape[-2]
        m, total = q.new_full((*q.shape[:-1], 1), _NEVER), q.new_zeros(*q.shape[:-1], 1)
        o = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for start, stop in tiles:
            s = self._at("scores", q @ k[:, :, start:stop].mT) * inputs.scale
            visible = inputs.mask.visible(queries, keys, (0, queries), (start, stop), q.device)
            s = s if visible is None else s.masked_fill(~visible, _NEVER)
            m_next = torch.maximum(m, self._at("maximum", s.amax(-1, keepdim=True)))
            shift = m_next.masked_fill(m_next == _NEVER, 0.0)
            alpha, p = self._at("rescale", torch.exp(m - shift)), torch.exp(s - shift)
            total = self._at("row_sum", alpha * total + p.sum(-1, keepdim=True))
            product = _rounded(p, policy.probabilities) @ v[:, :, start:stop]
            o, m = self._at("accumulator", self._at("kept", alpha * o) + product), m_next
        lse, total = m.masked_fill(m == _NEVER, 0.0) + torch.log(total), total.masked_fill(total == 0, 1.0)
        if self.step != "division":
            return o / total, lse
        return self._at("division", self._at("division", o) * self._at("division", 1 / total)), lse

    def _at(self, step: str, x: Tensor) -> Tensor:
        return _rounded(x, Cast(self.fmt)) if step == self.step else x


def _rounded(x: Tensor, cast: Any) -> Tensor:
    never = x.isneginf()
    result: Tensor = cast(x.masked_fill(never, 0.0)).to(x.dtype).masked_fill(never, _NEVER)
    return result


@dataclass(frozen=True)
class Candidate:
    """One way in which a kernel may compute.

    Attributes:
        name: for programs, such as `row_sum=bf16`.
        title: for people, to follow "errs as" and "does": `the row sum in BF16`.
        policy, softmax: of the tiled attention that predicts it.
        place: predicts it instead, where it is set.
        after: what happens to the outputs of the prediction.
        permitted: whether a kernel of the declared policy may compute so.
    """

    name: str
    title: str
    policy: Precision
    softmax: OnlineSoftmax = PLAIN
    place: Place | None = None
    after: Callable[[Outputs], Outputs] | None = None
    permitted: bool = False

    def predict(self, inputs: Inputs, tiling: Tiling) -> Outputs:
        """Out and LSE of the inputs in these tiles, as they are stored."""
        if self.place is not None:
            outputs = self.place(inputs, self.policy, tiling)
        else:
            q, k, v = (x.to(self.policy.carrier) for x in inputs.qkv)
            outputs = Tiled(self.policy, tiling, self.softmax, count=False)(q, k, v, inputs.mask, inputs.scale).tensors()
        return outputs if self.after is None else self.after(outputs)


def _narrower(fmt: Format) -> Iterator[Format]:
    yield from (each for each in _NARROW if each.precision < fmt.precision and each.bits <= fmt.bits)


def steps(declared: Precision) -> Iterator[Candidate]:
    """The declared policy, and every step of it in every narrower format; P in wider ones too, which err no more."""
    yield Candidate(DECLARED, "the declared policy", declared, permitted=True)
    yield Candidate("rescale_threshold=8", "rescaling only when a maximum rises by more than 8", declared, LAZY, permitted=True)
    for step, title in _STEPS.items():
        own = getattr(declared, step)
        cast = own.accumulate if isinstance(own, Dot) else own
        for fmt in _narrower(cast.to):
            to = Cast(fmt, overflow=Overflow.SATURATE) if fmt.bits == 8 else Cast(fmt)
            policy = declared.with_step(**{step: Dot(to) if isinstance(own, Dot) else to})
            if fmt.bits > 8 or step == "probabilities":
                yield Candidate(f"{step}={fmt}", f"{title} in {_name(fmt)}", policy)
            if fmt.bits == 8 and step == "probabilities":
                for factor in (256.0, 448.0, 1024.0):
                    soft = replace(PLAIN, p_scale=factor)
                    yield Candidate(f"{step}={fmt}*{factor:g}", f"P times {factor:g} in {_name(fmt)}", policy, soft)
        for fmt in (FP16, FP32) if step == "probabilities" and cast.to in (BF16, FP16) else ():
            if fmt != cast.to:
                name = f"P in {_name(fmt)}"
                yield Candidate(
                    f"{step}={fmt}", name, declared.with_step(**{step: fmt}), permitted=fmt.precision > cast.to.precision
                )


def recurrences(declared: Precision) -> Iterator[Candidate]:
    """The exponential by polynomials, and other terms of the row sum."""
    for degree in (2, 3, 4):
        exp = Exponential.polynomial(EXP2_MINIMAX[degree])
        yield Candidate(
            f"exp=poly{degree}", f"an exponential by a polynomial of degree {degree}", declared, OnlineSoftmax(exp=exp)
        )
    summed = replace(PLAIN, sum_over=SumOver.PROBABILITIES)
    yield Candidate("sum_over=probabilities", "a row sum over the rounded P", declared, summed)
    title = "a scale multiplied into q, which is then rounded"
    for exp, name in ((Exponential.EXP2, "exp2"), (Exponential.EXP, "exp")):
        yield Candidate(f"scale_on=queries {name}", title, declared, OnlineSoftmax(exp=exp, scale_on=ScaleOn.QUERIES))
    stale = replace(PLAIN, rescale_threshold=_NEVER_RISES)
    yield Candidate("maximum stale", "a maximum that stays that of the first tile", declared, stale)


def places(declared: Precision) -> Iterator[Candidate]:
    """Roundings of stored results."""
    low = declared.output.to
    formats = dict.fromkeys((BF16, FP16, low)) if low.bits >= 16 else dict.fromkeys((BF16, FP16))
    titles = {
        "scores": "scores stored in {}",
        "maximum": "the running maximum in {}",
        "rescale": "alpha stored in {}",
        "row_sum": "the row sum stored in {} after each tile",
        "accumulator": "the accumulator stored in {} after each tile",
        "kept": "the accumulator rescaled in {}",
        "division": "the division by l in {}",
    }
    for step, title in titles.items():
        for fmt in formats:
            name = f"accumulator={fmt} rescaled" if step == "kept" else f"{step}={fmt} stored"
            yield Candidate(name, title.format(_name(fmt)), declared, place=Place(step, fmt))


def stored(declared: Precision) -> Iterator[Candidate]:
    """Outputs that are stored in another way than declared."""
    out = declared.output
    wide = declared.with_step(output=FP32)

    def through(fmt: Format) -> Callable[[Outputs], Outputs]:
        return lambda x: x | {"out": _rounded(_rounded(x["out"], Cast(fmt)), out)}

    for fmt in (BF16, FP16, E4M3FN):
        if fmt != out.to and (fmt.precision < out.to.precision or fmt.exponent_bits < out.to.exponent_bits):
            yield Candidate(f"output={fmt}", f"an output through {_name(fmt)}", wide, after=through(fmt))
    yield Candidate("output=fp32", "an output in FP32", wide, permitted=True)
    for fmt in (BF16, FP16):
        yield Candidate(f"lse={fmt}", f"an LSE in {_name(fmt)}", declared, after=_lse_in(fmt))
    yield Candidate("lse base 2", "an LSE in base 2", declared, after=lambda x: x | {"lse": x["lse"] / math.log(2)})
    yield Candidate("lse scaled", "an LSE times log 2", declared, after=lambda x: x | {"lse": x["lse"] * math.log(2)})


def _lse_in(fmt: Format) -> Callable[[Outputs], Outputs]:
    return lambda x: x | {"lse": _rounded(x["lse"], Cast(fmt))}


def catalogue(declared: Precision) -> tuple[Candidate, ...]:
    """Every candidate whose prediction depends on inputs and tiles alone; names are unique."""
    every = (*steps(declared), *recurrences(declared), *places(declared), *stored(declared))
    return tuple({each.name: each for each in every}.values())


def _name(fmt: Format) -> str:
    return {"e4m3fn": "E4M3", "e5m2": "E5M2"}.get(str(fmt), str(fmt).upper())


TILES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
"""Sizes Bc by which the tiles of a kernel are looked for."""
ORDERS = (Order.FORWARD, Order.REVERSE)
WIDE = tuple(Tiling(bc=bc, order=order) for bc in TILES for order in ORDERS)
SPLIT = tuple(Tiling(bc=bc, splits=splits) for bc in (32, 64, 128) for splits in (2, 4, 8))
USUAL = tuple(Tiling(bc=bc, order=order) for bc in (32, 64, 128) for order in ORDERS)
"""The tiles of the kernels that ship: their largest error is what a policy permits."""
