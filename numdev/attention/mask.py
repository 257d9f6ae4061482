"""Which keys a query sees, and what is done to the scores and to P."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from jaxtyping import Bool, Float, Int

from numdev.errors import BadInput
from numdev.lazy import torch


@dataclass(frozen=True, eq=False)
class Bias:
    """What is added to the scaled scores, minus infinity for a key that is not seen. Equal where all values are.

    Attributes:
        values: `[batch or 1, heads or 1, queries, keys]`, floating, on the CPU; without NaN or infinity.
        source: the same numbers as a tensor of a model that learns them; None where no gradient by them is wanted.
    """

    values: torch.Tensor = field(repr=False)  # its shape is checked below
    source: torch.Tensor | None = field(default=None, repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        x = self.values
        if x.ndim != 4 or not x.is_floating_point() or bool((x.isnan() | (x == float("inf"))).any()):
            hint = "give [batch or 1, heads or 1, queries, keys] of a floating dtype, without NaN or infinity"
            raise BadInput("attn_mask", f"{tuple(x.shape)} in {x.dtype}", hint)
        held = x.detach().cpu().double().contiguous()
        object.__setattr__(self, "values", held)
        object.__setattr__(self, "digest", hashlib.sha256(f"{tuple(held.shape)}".encode() + held.numpy().tobytes()).hexdigest())

    @staticmethod
    def hiding(seen: Bool[torch.Tensor, "batch_or_1 heads_or_1 queries keys"]) -> Bias:
        """That of a boolean mask, which is True where a key is seen."""
        return Bias(torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen.cpu(), float("-inf")))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bias) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def describe(self) -> str:
        """Its canonical form in a configuration."""
        return self.digest

    @property
    def adds(self) -> bool:
        """Whether a score that is seen changes."""
        return bool((self.values.isfinite() & (self.values != 0)).any())


@dataclass(frozen=True, eq=False)
class Dropout:
    """`P Z` in place of P in the product with V, where Z is `1 / (1 - p)` for what is kept, else 0. Equal to itself alone.

    l and the LSE are those of P. Backward, `dV = (P Z)^T dO` and `dP = Z * (dO V^T)` (Dao et al. 2022, Algorithm 4). P Z is
    rounded once, to the format of `probabilities`; Z dP to that of `dp`.

    Attributes:
        kept: `[batch or 1, heads or 1, queries, keys]`, boolean.
        p: the probability with which an entry is dropped, below 1.
    """

    kept: torch.Tensor = field(repr=False)  # its shape is checked below
    p: float

    def __post_init__(self) -> None:
        if self.kept.ndim != 4 or self.kept.dtype is not torch.bool or not 0 <= self.p < 1:
            hint = "give a boolean [batch or 1, heads or 1, queries, keys], and p of at least 0 and below 1"
            raise BadInput("dropout", f"{tuple(self.kept.shape)} in {self.kept.dtype}, p={self.p}", hint)

    def describe(self) -> str:
        """Its canonical form in a configuration: p, and the SHA-256 of what is kept."""
        held = f"{tuple(self.kept.shape)}".encode() + self.kept.cpu().numpy().tobytes()
        return f"{self.p} {hashlib.sha256(held).hexdigest()}"


@dataclass(frozen=True)
class Mask:
    """The conjunction of a causal limit, a sliding window, a number of keys per batch entry, and a tensor added to the scores.

    Implementations of torch operations also cap the scores and drop entries of P; others refuse these fields by name.

    With `Nq` queries and `Nk` keys, query `i` stands at position `p = i + Nk - Nq`: bottom-right aligned, so that the last
    query sees the last key (FlashAttention 2.1 and later).

    Attributes:
        causal: key `j` is seen only if `j <= p`.
        window: key `j` is seen only if `|p - j| < window`; with `causal`, the last `window` keys.
        key_lengths: for each batch entry, the number of keys that exist; the rest is padding.
        bias: what is added to the scores, minus infinity for a key that is not seen: padding before the sequences, packed
            documents, relative positions. An implementation that adds nothing refuses it by the name `attn_mask`.
        softcap: `cap` in `S = cap tanh(scale Q K^T / cap)`, before anything is added or hidden (Gemma 2, arXiv 2408.00118). The
            tanh, then its product with the cap, are each rounded to the format of the scores. Backward, dS is multiplied by
            `1 - tanh^2`, and rounded to the format of `difference`.
        dropout: which entries of P are dropped.
    """

    causal: bool = False
    window: int | None = None
    key_lengths: tuple[int, ...] | None = None
    bias: Bias | None = None
    softcap: float | None = None
    dropout: Dropout | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise BadInput("problem.window", self.window, "give the width of the window, at least 1, or null")
        if self.key_lengths is not None and any(length < 0 for length in self.key_lengths):
            raise BadInput("problem.key_lengths", self.key_lengths, "give one length of at least 0 per batch entry")
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise BadInput("problem.softcap", self.softcap, "give a positive finite number, such as 50, or null")

    @property
    def is_none(self) -> bool:
        return self == Mask()

    def check(self, batch: int, keys: int, heads: int = 1, queries: int | None = None) -> None:
        """Raise BadInput unless `key_lengths` fits the batch and the number of keys, and `bias` and `dropout` the scores."""
        tensors = [] if self.bias is None else [("attn_mask", self.bias.values)]
        tensors += [] if self.dropout is None else [("dropout", self.dropout.kept)]
        for name, tensor in tensors:
            shape, scores = tuple(tensor.shape), (batch, heads, queries or tensor.shape[2], keys)
            if any(size not in (own, 1)[: 1 + (axis < 2)] for axis, (size, own) in enumerate(zip(shape, scores, strict=True))):
                raise BadInput(name, shape, f"it must fit the scores, {scores}")
        lengths = self.key_lengths
        if lengths is not None and (len(lengths) != batch or max(lengths) > keys):
            raise BadInput("problem.key_lengths", lengths, f"give {batch} lengths, one per batch entry, of at most {keys}")

    def key_range(
        self, queries: int, keys: int, rows: Int[torch.Tensor, " rows"], length: int
    ) -> tuple[Int[torch.Tensor, " rows"], Int[torch.Tensor, " rows"]]:
        """The half-open range of keys that each of `rows` sees of a batch entry with `length` keys; `high <= low` is none."""
        position = rows + (keys - queries)
        low, high = torch.zeros_like(rows), torch.full_like(rows, length)
        if self.causal:
            high = torch.minimum(high, position + 1)
        if self.window is not None:
            low = (position - self.window + 1).clamp(min=0)
            high = torch.minimum(high, position + self.window)
        return low, high

    def lengths(self, batch: int, keys: int) -> tuple[int, ...]:
        """The number of keys of each batch entry."""
        return self.key_lengths or (keys,) * batch

    def seeing_heads(self, batch: int, queries: int, keys: int) -> Bool[torch.Tensor, "batch heads_or_1 queries"]:
        """Whether each query sees a key at all, with the bias of its head."""
        if self.bias is None:
            return self.seeing_rows(batch, queries, keys)[:, None]
        seen = self.visible(queries, keys, (0, queries), (0, keys), torch.device("cpu"))
        return torch.ones(batch, 1, queries, dtype=torch.bool) if seen is None else seen.any(-1).expand(batch, -1, -1)

    def seeing_rows(self, batch: int, queries: int, keys: int) -> Bool[torch.Tensor, "batch queries"]:
        """Whether each query sees a key at all, the bias aside."""
        rows = torch.arange(queries)
        ranges = [self.key_range(queries, keys, rows, length) for length in self.lengths(batch, keys)]
        return torch.stack([high > low for low, high in ranges])

    def without_padding(self, x: Float[torch.Tensor, "batch heads keys dim"]) -> Float[torch.Tensor, "batch heads keys dim"]:
        """k or v with zeros for the keys that do not exist, so that nothing in them can reach a result."""
        if self.key_lengths is None:
            return x
        lengths = torch.tensor(self.key_lengths, device=x.device)[:, None, None, None]
        return x.masked_fill(torch.arange(x.shape[-2], device=x.device)[:, None] >= lengths, 0.0)

    def query_range(self, queries: int, keys: int, start: int, stop: int) -> tuple[int, int]:
        """The half-open range of queries outside which no query sees any key of `[start, stop)`."""
        shift = keys - queries
        first = start - shift if self.causal else 0
        last = queries
        if self.window is not None:
            first = max(first, start - shift - self.window + 1)
            last = min(last, stop - 1 - shift + self.window)
        return min(max(first, 0), queries), max(min(last, queries), 0)

    def visible(
        self, queries: int, keys: int, rows: tuple[int, int], columns: tuple[int, int], device: torch.device
    ) -> Bool[torch.Tensor, "batch_or_1 heads_or_1 rows columns"] | None:
        """Whether each query of `rows` sees each key of `columns`; None where all do."""
        seen = self._within(queries, keys, rows, columns, device)
        if self.bias is None:
            return seen
        own = self.bias.values[:, :, slice(*rows), slice(*columns)] > float("-inf")
        if bool(own.all()):
            return seen
        return own.to(device) if seen is None else seen & own.to(device)

    def _within(
        self, queries: int, keys: int, rows: tuple[int, int], columns: tuple[int, int], device: torch.device
    ) -> Bool[torch.Tensor, "batch_or_1 1 rows columns"] | None:
        """`visible` without the bias."""
        if self._all_visible(queries, keys, rows, columns):
            return None
        position = torch.arange(*rows, device=device)[:, None] + (keys - queries)
        key = torch.arange(*columns, device=device)[None, :]
        seen = torch.ones(1, 1, rows[1] - rows[0], columns[1] - columns[0], dtype=torch.bool, device=device)
        if self.causal:
            seen = seen & (key <= position)
        if self.window is not None:
            seen = seen & ((position - key).abs() < self.window)
        if self.key_lengths is not None:
            lengths = torch.tensor(self.key_lengths, device=device)[:, None, None, None]
            seen = seen & (key < lengths)
        return seen

    def seen(
        self, queries: int, keys: int, rows: tuple[int, int], columns: tuple[int, int], device: torch.device, kv_heads: int
    ) -> Bool[torch.Tensor, "batch_or_1 kv_heads_or_1 group_or_1 rows columns"] | None:
        """See `visible`, of heads that are grouped by the KV head that they share."""
        visible = self.visible(queries, keys, rows, columns, device)
        return None if visible is None else grouped(visible, kv_heads)

    def of_heads(self, first: int, last: int) -> Mask:
        """That of some heads."""
        bias, dropout = self.bias, self.dropout
        if bias is not None and bias.values.shape[1] > 1:
            bias = Bias(bias.values[:, first:last])
        if dropout is not None and dropout.kept.shape[1] > 1:
            dropout = Dropout(dropout.kept[:, first:last], dropout.p)
        return replace(self, bias=bias, dropout=dropout)

    def added(
        self, rows: tuple[int, int], columns: tuple[int, int], like: torch.Tensor
    ) -> Float[torch.Tensor, "batch_or_1 kv_heads_or_1 group_or_1 rows columns"] | None:
        """What is added to scores `like [batch, kv_heads, group, ...]`, 0 where a key is not seen; None for nothing."""
        if self.bias is None or not self.bias.adds:
            return None
        block = self.bias.values[:, :, slice(*rows), slice(*columns)]
        return grouped(block.masked_fill(block == float("-inf"), 0.0).to(like), like.shape[1])

    def cap_(self, s: torch.Tensor) -> None:
        """Cap the scores in place, where there is a softcap."""
        if self.softcap is not None:
            s.div_(self.softcap).tanh_().mul_(self.softcap)

    def cap_slope(self, s: torch.Tensor) -> torch.Tensor | None:
        """The derivative of the cap at scores before it, `1 - tanh^2 = 4 e / (1 + e)^2` with `e = exp(-2 |s| / cap)`.

        The left side would cancel. None without a softcap.
        """
        if self.softcap is None:
            return None
        e = (s.abs() * (-2 / self.softcap)).exp_()
        return 4 * e / ((1 + e) * (1 + e))

    @property
    def keep_scale(self) -> float:
        """`1 / (1 - p)`, the factor of what dropout keeps."""
        return 1.0 if self.dropout is None else 1 / (1 - self.dropout.p)

    def dropped(
        self, rows: tuple[int, int], columns: tuple[int, int], like: torch.Tensor
    ) -> Bool[torch.Tensor, "batch_or_1 kv_heads_or_1 group_or_1 rows columns"] | None:
        """Entries of P that dropout drops, on the device of `like [batch, kv_heads, group, ...]`; None without dropout."""
        if self.dropout is None:
            return None
        return grouped(~self.dropout.kept[:, :, slice(*rows), slice(*columns)].to(like.device), like.shape[1])

    def times_z(
        self, x: Float[torch.Tensor, "batch kv_heads group rows keys"], rows: tuple[int, int]
    ) -> Float[torch.Tensor, "batch kv_heads group rows keys"]:
        """`Z x`, P or dP of some rows under dropout."""
        dropped = self.dropped(rows, (0, x.shape[-1]), x)
        return x if dropped is None else x.masked_fill(dropped, 0.0) * self.keep_scale

    def _all_visible(self, queries: int, keys: int, rows: tuple[int, int], columns: tuple[int, int]) -> bool:
        first, last = rows[0] + keys - queries, rows[1] - 1 + keys - queries
        near = self.window is None or (last - columns[0] < self.window and columns[1] - 1 - first < self.window)
        before = not self.causal or columns[1] - 1 <= first
        present = self.key_lengths is None or min(self.key_lengths) >= columns[1]
        return near and before and present


def ungrouped(x: torch.Tensor, bias: Bias) -> torch.Tensor:
    """`[batch, kv_heads, group, rows, columns]` summed over the batch and the heads that share the numbers of a bias."""
    shared = [axis for axis in range(2) if bias.values.shape[axis] == 1]
    x = x.flatten(1, 2)
    return x.sum(shared, keepdim=True) if shared else x


def grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[batch, heads or 1, ...]` with the heads that share a KV head as an own dimension."""
    return x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (kv_heads, -1))
