"""Numbers that share a scale: microscaled formats, and q, k and v on a coarse grid as attention in few bits gets them.

Microscaling is `x ~ X P`, with an element `P` of 4 to 8 bits and a scale `X`, itself a number of a narrow format, for every
`block` of them. The Open Compute Project's MX formats hold `X` in E8M0, a power of two (OCP Microscaling Formats v1.0, section
5); NVIDIA's NVFP4 holds it in E4M3, relative to one FP32 scale for the tensor (Pretraining LLMs with NVFP4, arXiv 2509.25149,
section 2).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace
from enum import Enum
from typing import Any

from jaxtyping import Float, Int

from numdev.arithmetic.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, Format
from numdev.arithmetic.rounding import Cast, Noise, Overflow, Rounding
from numdev.errors import BadInput
from numdev.lazy import torch
from numdev.settings import setting

_SCALE_RANGE = 127  # exponents of E8M0: -127 to 127 (OCP MX v1.0, section 5.4.1)


class BlockScale(Enum):
    """Scales of a block, with `a` the largest magnitude in it and `top` the largest element."""

    E8M0 = "e8m0"  # 2^(floor(log2 a) - emax), emax of the element format (OCP MX v1.0, section 6.3)
    E4M3 = "e4m3"  # e4m3(a / top), nearest even and saturating
    E4M3_FP32 = "e4m3_fp32"  # t e4m3(a / (top t)), t = fp32(max |x| / (top 448)) over the whole tensor: NVFP4


@dataclass(frozen=True)
class Microscaled:
    """Rounding to a microscaled format: `X element(x / X)` for each block of the last dimension, elements saturating.

    The result is returned dequantised. The last block of a row may be shorter. A block of zeros, or one whose E4M3 scale rounds
    to zero, is zero. NaN or Inf makes the whole block NaN (OCP MX v1.0, section 6.3).

    Attributes:
        element: the cast of an element, which saturates.
        block: numbers that share a scale.
        scale: see `BlockScale`.
    """

    element: Cast
    block: int
    scale: BlockScale

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput("microscaled.block", self.block, "give the number of elements per scale, at least 1")
        if self.element.overflow is not Overflow.SATURATE:
            hint = f"elements saturate (OCP MX v1.0, section 6.3); write {self.element.to}:saturate"
            raise BadInput("microscaled.element", str(self.element), hint)

    @staticmethod
    def parse(text: str) -> Microscaled:
        """Read a name of `MICROSCALED`, or `element/block/scale` such as `e2m1finite/32/e8m0`."""
        if text in MICROSCALED:
            return MICROSCALED[text]
        element, _, rest = text.partition("/")
        block, _, scale = rest.partition("/")
        if not block.isdigit() or scale not in {member.value for member in BlockScale}:
            hint = f"use one of {', '.join(MICROSCALED)}, or element/block/scale, such as e2m1finite/32/e8m0"
            raise BadInput("microscaled", text, f"{hint}; scales are {', '.join(member.value for member in BlockScale)}")
        return Microscaled(Cast.parse(element), int(block), BlockScale(scale))

    @staticmethod
    def is_named_by(text: str) -> bool:
        """Whether a text is meant as a microscaled format, and should be parsed and reported as one."""
        return "/" in text or text in MICROSCALED

    def __str__(self) -> str:
        return _NAMES.get(self, f"{self.element}/{self.block}/{self.scale.value}")

    describe = __str__  # in a configuration

    def __repr__(self) -> str:
        return f"Microscaled({self})"

    @property
    def largest(self) -> float:
        """Infinity: there is no largest result, since the scale adapts to the numbers."""
        return float("inf")

    def __call__(self, x: Float[torch.Tensor, "*shape last"], noise: Noise | None = None) -> Float[torch.Tensor, "*shape last"]:
        """`x` rounded along its last dimension, in a tensor of the same dtype. `noise` is as in `Cast.apply_`."""
        return self.apply_(x.clone(), noise)

    def apply_(self, x: Float[torch.Tensor, "*shape last"], noise: Noise | None = None) -> Float[torch.Tensor, "*shape last"]:
        """Round `x` in place and return it."""
        blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % self.block)).unflatten(-1, (-1, self.block))
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = self._scales(largest).masked_fill_(~largest.isfinite(), float("nan"))
        each = scale.expand(blocks.shape).flatten(-2)[..., : x.shape[-1]]
        return self.element.apply_(x.div_(torch.where(each == 0, 1.0, each)), noise).mul_(each)

    def along(self, x: Float[torch.Tensor, "*shape"], dim: int, noise: Noise | None = None) -> Float[torch.Tensor, "*shape"]:
        """`x` rounded along another dimension."""
        return self(x.transpose(dim, -1).contiguous(), noise).transpose(dim, -1).contiguous()

    def _scales(self, largest: Float[torch.Tensor, "*shape 1"]) -> Float[torch.Tensor, "*shape 1"]:
        """The scale of each block from its largest magnitude."""
        if self.scale is BlockScale.E8M0:
            _, exponent = torch.frexp(largest)  # a = f 2^e, 1/2 <= f < 1
            power = (exponent.long() - 1 - self.element.to.emax).clamp_(-_SCALE_RANGE, _SCALE_RANGE)
            return ((power + 1023) << 52).view(torch.float64).to(largest.dtype)  # 2^power, from its bits
        top = self.element.to.max
        if self.scale is BlockScale.E4M3:
            return _E4M3(largest / torch.full_like(largest, top))  # see `_shared_scales`
        whole = (largest.amax() / (top * E4M3FN.max)).float().to(largest.dtype)
        return _E4M3(largest / (top * torch.where(whole == 0, 1.0, whole))) * whole


_E4M3 = Cast(E4M3FN, overflow=Overflow.SATURATE)
_FP4 = Cast(E2M1)

MICROSCALED = {
    "mxfp8_e4m3": Microscaled(_E4M3, 32, BlockScale.E8M0),
    "mxfp8_e5m2": Microscaled(Cast(E5M2, overflow=Overflow.SATURATE), 32, BlockScale.E8M0),
    "mxfp6_e3m2": Microscaled(Cast(E3M2), 32, BlockScale.E8M0),
    "mxfp6_e2m3": Microscaled(Cast(E2M3), 32, BlockScale.E8M0),
    "mxfp4": Microscaled(_FP4, 32, BlockScale.E8M0),
    "nvfp4": Microscaled(_FP4, 16, BlockScale.E4M3_FP32),
}
"""The published formats (OCP MX v1.0, table 1; NVFP4)."""
_NAMES = {fmt: name for name, fmt in MICROSCALED.items()}


class Scale(Enum):
    """How many numbers share one scale."""

    TENSOR = "tensor"
    HEAD = "head"  # one head of one batch entry
    BLOCK = "block"  # `block` rows of one head
    ROW = "row"
    CHANNEL = "channel"  # one of the head_dim columns of one head
    THREAD = "thread"  # of each `block` rows of a head those that one thread of a tensor core's warp holds


class Smoothing(Enum):
    """Which tensors have their mean over tokens subtracted before quantisation (SageAttention 1: k; SageAttention 2: q too)."""

    NONE = "none"
    K = "k"
    Q = "q"
    QK = "qk"

    @property
    def of_q(self) -> bool:
        return self in (Smoothing.Q, Smoothing.QK)

    @property
    def of_k(self) -> bool:
        return self in (Smoothing.K, Smoothing.QK)


@dataclass(frozen=True)
class Quantised:
    """Rounding with a scale: `x ~ s * to(x / s)`, `s = max |x| / to.max` over the numbers that share it.

    The result is returned dequantised, in FP64: a kernel multiplies codes first and applies scales after the product, which is
    the same in exact arithmetic and differs by the carrier's roundoff, far below the format's. Rotation is undone after
    rounding for the same reason: `(R q).(R k) = q.k` for an orthogonal R. So is smoothing of k: subtracting the mean of k takes
    the same `q.mean(k)` from every score of a row, which leaves softmax unchanged but not LSE.

    A mean `c` subtracted from q is added back as its product with k *before* k is quantised: `S = (q - c)^ . k^ + c . k`
    (SageAttention2, arXiv 2411.10958, smoothing Q). Both are terms of one inner product: with `Smoothing.Q` and `QK` the
    returned q is `[(q - c)^, c]` and k is `[k^, k]`, of twice the head_dim; give attention on them the scale of the problem.

    A rotation (FlashAttention-3, section 3.3: incoherent processing) spreads an outlier over head_dim. A microscaled format
    has scales of its own along the dimension that is summed over; a cast has one for the tensor unless `scale` says otherwise.
    """

    to: Cast | Microscaled = setting(MISSING, "grid that q, k and v are rounded to after division by their scale", "format")
    scale: Scale | None = setting(
        None,
        "numbers of q, k and v that share a scale: tensor, head, block of rows, row, channel or thread; empty if microscaled",
    )
    block: int = setting(128, "rows of a head that share one scale, with a scale per block", "rows")
    block_q: int | None = setting(None, "rows of q that share one, where they are not as many; empty where they are", "rows")
    hadamard: bool = setting(False, "whether q and k are turned by a random Hadamard matrix before rounding, and back after it")
    smoothing: Smoothing = setting(
        Smoothing.NONE, "whose mean over tokens is taken out before rounding: none, k's, q's, or both (qk)"
    )
    smoothing_block: int | None = setting(None, "how many tokens of q share the mean that is taken out; empty for all", "tokens")
    values: Cast | Microscaled | None = setting(
        None, "v, where it is not quantised like q and k, which is `same`; empty where it is", "format", none="same"
    )
    values_scale: Scale | None = setting(
        None,
        "numbers of v that share one scale where v has a grid of its own; empty without a scale, which is `none`",
        none="none",
    )
    seed: int = setting(0, "what the signs of the Hadamard matrix are drawn with")
    queries: Cast | None = setting(
        None, "q, where it is only rounded, as beside a cache of k and v in fewer bits; empty where it is quantised too", "format"
    )

    def __post_init__(self) -> None:
        for name in ("block", "block_q", "smoothing_block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"precision.quantise.{name}", value, "give a number of rows, at least 1")
        if self.scale is None and isinstance(self.to, Cast):
            object.__setattr__(self, "scale", Scale.TENSOR)
        for name, to, scale in (("scale", self.to, self.scale), ("values_scale", self.values, self.values_scale)):
            if scale is not None and not isinstance(to, Cast):
                why = "there are no values; give their format" if to is None else f"{to} has scales of its own; give null"
                raise BadInput(f"precision.quantise.{name}", scale.value, why)
        if Scale.THREAD in (self.values_scale, self.scale if self.values is None else None):
            raise BadInput("precision.quantise.values_scale", "thread", "only q and k have it; give values another one")
        if self.queries is not None and (self.hadamard or self.smoothing.of_q):
            hint = "q that is turned or smoothed is quantised; give null, or hadamard=false and smoothing none or k"
            raise BadInput("precision.quantise.queries", str(self.queries), hint)
        if self.smoothing_block is not None and not self.smoothing.of_q:
            hint = "it is of q's mean; give smoothing q or qk"
            raise BadInput("precision.quantise.smoothing_block", self.smoothing_block, hint)

    @staticmethod
    def is_named_by(text: str) -> bool:
        return Microscaled.is_named_by(text)

    @staticmethod
    def parse(text: str) -> Quantised:
        """Inputs in a microscaled format, the only ones that one text names."""
        return Quantised(Microscaled.parse(text))

    def but(self, **changed: Any) -> Quantised:
        """With other fields; a scale or block that has no meaning beside them goes, unless it is one of them."""
        if isinstance(changed.get("to"), Microscaled):
            changed.setdefault("scale", None)
        if "smoothing" in changed and not changed["smoothing"].of_q:
            changed.setdefault("smoothing_block", None)
        if "values" in changed and not isinstance(changed["values"], Cast):
            changed.setdefault("values_scale", None)
        return replace(self, **changed)

    @property
    def idle(self) -> dict[str, str]:
        """Settings that the others leave without effect, and the value under which each would have one."""
        blocks, field = (Scale.BLOCK, Scale.THREAD), "precision.quantise"
        readers = {} if self.hadamard else {f"{field}.seed": f"{field}.hadamard=true"}
        if self.scale not in blocks:
            readers[f"{field}.block_q"] = f"{field}.scale=block"
            if self.values_scale not in blocks:
                readers[f"{field}.block"] = f"{field}.scale=block"
        return readers

    def __str__(self) -> str:
        parts = [f"{self.to}"]
        if self.scale is not None:
            parts.append(self._shared(self.scale))
        if self.block_q is not None:
            parts.append(f"{self.block_q} of q")
        if self.hadamard:
            parts.append("Hadamard")
        if self.smoothing is not Smoothing.NONE:
            per = "" if self.smoothing_block is None else f" per {self.smoothing_block} of q"
            parts.append(f"mean of {self.smoothing.value} removed{per}")
        if self.values is not None:
            parts.append(f"values {self.values}")
        if self.values_scale is not None:
            parts.append(self._shared(self.values_scale))
        if self.queries is not None:
            parts.append(f"queries {self.queries}")
        return ", ".join(parts)

    def _shared(self, scale: Scale) -> str:
        return f"scale per {scale.value}" + (f" of {self.block} rows" if scale in (Scale.BLOCK, Scale.THREAD) else "")

    def __call__(
        self,
        q: Float[torch.Tensor, "batch heads queries dim"],
        k: Float[torch.Tensor, "batch kv_heads keys dim"],
        v: Float[torch.Tensor, "batch kv_heads keys dim"],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v quantised and dequantised, in FP64; q and k have twice the dim where q is smoothed."""
        q, k, v = q.double(), k.double(), v.double()
        noise = Noise()  # each of the three is a rounding event of its own
        rotation = random_hadamard(q.shape[-1], self.seed).to(q.device) if self.hadamard else None
        mean_k = k.mean(-2, keepdim=True) if self.smoothing.of_k else torch.zeros_like(k[..., :1, :])
        rounded_k = self._rotated(k - mean_k, rotation, noise, is_q=False) + mean_k
        if self.smoothing.of_q:
            mean_q = self._means(q)
            q = torch.cat([self._rotated(q - mean_q, rotation, noise, is_q=True), mean_q], -1)
            return q, torch.cat([rounded_k, k], -1), self._values(v, noise)
        rounded_q = self._rotated(q, rotation, noise, is_q=True) if self.queries is None else self.queries(q, noise)
        return rounded_q, rounded_k, self._values(v, noise)

    def code_format(self, *, of_v: bool) -> Format | None:
        """That of the codes of q and k, or of v, which a kernel multiplies before it applies their scales; None where it cannot.

        A scale is a factor of a product where it is one for a tensor, a head or a block of rows.
        """
        to, scale = self._grid(of_v=of_v)
        changed = not of_v and (self.queries is not None or self.smoothing is not Smoothing.NONE)
        if changed or isinstance(to, Microscaled) or to.rounding is Rounding.STOCHASTIC:
            return None
        return to.to if scale in (None, Scale.TENSOR, Scale.HEAD, Scale.BLOCK) else None

    def codes(
        self, x: Float[torch.Tensor, "batch heads tokens dim"], name: str
    ) -> tuple[Float[torch.Tensor, "batch heads tokens dim"], Float[torch.Tensor, "batch heads tokens 1"]]:
        """Codes `c` of q, k or v and the scale `s` of each row, `x R ~ s c`, in FP32 as a kernel has them: each is rounded once.

        R is the rotation of q and k. Of numbers that are codes times a scale, rotated back or not, the codes are what they were.
        """
        to, scale = self._grid(of_v=name == "v")
        assert isinstance(to, Cast)
        if self.hadamard and name != "v":
            x = x.double() @ random_hadamard(x.shape[-1], self.seed).to(x.device)
        x, is_q = x.float(), name == "q"
        if scale is None:
            return to(x), torch.ones_like(x[..., :1])
        factor = _shared_scales(x, to, scale, self.rows(name), is_q=is_q)
        return to((x / factor).clamp(-to.to.max, to.to.max)), factor.expand_as(x[..., :1])

    def shared_by(self, *, of_v: bool) -> Scale | None:
        """What shares a scale of q and k, or of v."""
        return self._grid(of_v=of_v)[1]

    def rows(self, name: str) -> int:
        """Rows of q, k or v that share a scale of a block."""
        return self.block_q or self.block if name == "q" else self.block

    def _grid(self, *, of_v: bool) -> tuple[Cast | Microscaled, Scale | None]:
        return (self.values, self.values_scale) if of_v and self.values is not None else (self.to, self.scale)

    def _means(self, q: torch.Tensor) -> torch.Tensor:
        """The mean over tokens, or over each block of them, for every token."""
        size = self.smoothing_block or q.shape[-2]
        return torch.cat([part.mean(-2, keepdim=True).expand_as(part) for part in q.split(size, -2)], -2)

    def _rotated(self, x: torch.Tensor, rotation: torch.Tensor | None, noise: Noise, *, is_q: bool) -> torch.Tensor:
        """`x` rounded to the grid in the rotated basis."""
        turned = x if rotation is None else x @ rotation
        if isinstance(self.to, Microscaled):
            rounded = self.to(turned, noise)
        else:
            assert self.scale is not None, "a cast has one"
            rounded = self._round(turned, self.to, self.scale, noise, is_q=is_q)
        return rounded if rotation is None else rounded @ rotation.T

    def _values(self, v: torch.Tensor, noise: Noise) -> torch.Tensor:
        to, scale = self._grid(of_v=True)
        if isinstance(to, Microscaled):
            return to.along(v, -2, noise)
        return to(v, noise) if scale is None else self._round(v, to, scale, noise, is_q=False)

    def _round(self, x: torch.Tensor, to: Cast, scale: Scale, noise: Noise, *, is_q: bool) -> torch.Tensor:
        return round_shared(x, to, scale, self.rows("q" if is_q else "k"), noise, is_q=is_q)


def round_shared(
    x: Float[torch.Tensor, "batch heads tokens dim"],
    to: Cast,
    scale: Scale,
    rows: int,
    noise: Noise | None = None,
    *,
    is_q: bool = False,
    whole: torch.Tensor | None = None,
) -> Float[torch.Tensor, "batch heads tokens dim"]:
    """`s to(x / s)`, with a scale for each `rows` of a block as in `Quantised`; that of a tensor is of `whole`, if given."""
    factor, top = _shared_scales(x, to, scale, rows, is_q=is_q, whole=whole), to.to.max
    return to((x / factor).clamp(-top, top), noise) * factor  # the quotient's roundoff must not overflow


def _shared_scales(
    x: Float[torch.Tensor, "batch heads tokens dim"],
    to: Cast,
    scale: Scale,
    rows: int,
    *,
    is_q: bool,
    whole: torch.Tensor | None = None,
) -> Float[torch.Tensor, "*scales"]:
    """The scales of `round_shared`: `max |x| / to.max` over the numbers that share one, 1 where all are 0."""
    batch, heads, tokens, _ = x.shape
    if scale is Scale.TENSOR:
        largest = (x if whole is None else whole).abs().amax().to(x).expand(1, 1, 1, 1)
    elif scale is Scale.HEAD:
        largest = x.abs().amax((-1, -2), keepdim=True)
    elif scale is Scale.ROW:
        largest = x.abs().amax(-1, keepdim=True)
    elif scale is Scale.CHANNEL:
        largest = x.abs().amax(-2, keepdim=True)
    else:
        group = _groups(tokens, rows, scale, is_q=is_q).to(x.device)
        per_group = x.new_zeros(batch, heads, int(group.max()) + 1)
        per_group.scatter_reduce_(-1, group.expand(batch, heads, tokens), x.abs().amax(-1), "amax")
        largest = per_group[..., group][..., None]
    # Not by a number, of which a GPU multiplies by the reciprocal
    return torch.where(largest > 0, largest / torch.full_like(largest, to.to.max), 1.0)


def _groups(tokens: int, rows: int, scale: Scale, *, is_q: bool) -> Int[torch.Tensor, " tokens"]:
    """Which scale each token shares.

    A thread of a warp's `mma.m16n8k32` holds every eighth row of q, and of each eight keys two neighbours: eight groups of a
    block of q, four of a block of k (SageAttention2, per-thread quantization; `quant_per_thread.py` of its code).
    """
    token = torch.arange(tokens)
    block, inside = token // rows, token % rows
    if scale is Scale.BLOCK:
        return block
    return block * 8 + inside % 8 if is_q else block * 4 + inside % 8 // 2


def random_hadamard(dim: int, seed: int) -> Float[torch.Tensor, "dim dim"]:
    """A random orthogonal matrix `diag(s) H / sqrt(n)` in FP64, with random signs `s` and Sylvester's `H`.

    If `dim` is not a power of two, the matrix is block diagonal, with blocks of the largest power of two that divides `dim`.
    """
    from scipy.linalg import hadamard  # imported here: most measurements rotate nothing and need no scipy

    size = dim & -dim
    block = torch.from_numpy(hadamard(size, dtype=float))
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (dim,), generator=generator, dtype=torch.float64) * 2 - 1
    return signs[:, None] * torch.block_diag(*[block] * (dim // size)) / size**0.5
