"""q, k and v captured from a trained model, and dO where a backward pass was captured too."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from numdev.attention.problem import Shape
from numdev.errors import BadInput
from numdev.settings import setting

_SUFFIXES = (".safetensors", ".pt", ".npz")
_FIELD = "problem.source.path"


@dataclass(frozen=True, eq=False)
class _Layer:
    """q, k and v of a layer, each `[heads, tokens, head_dim]`; dO as the file has it, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None


@dataclass(frozen=True)
class Captured:
    """Tensors `<layer>.q`, `<layer>.k`, `<layer>.v` of a file, each `[heads, tokens, head_dim]` or with a batch before it.

    `<layer>.do`, in the shape of q, is the gradient of the output. The backward pass is measured on it where the file has it.

    A captured tensor has no seed: its replicates are its heads. A replicate takes `batch * heads` successive heads of one layer
    (batch entries of the file follow one another), and replicates alternate between the layers: first the first of each, then
    the second of each. So any number of replicates is spread over the layers as evenly as possible. Heads of one layer are
    alike, so the layer is the replicate's `cluster`. The first `queries` and `keys` tokens are used.

    Attributes:
        path: of a .safetensors, .pt (read with weights_only) or .npz file; `minilm` is the one that ships with numdev.
        layer: the name before `.q`; None takes all layers, in the order of their names.
        digest: SHA-256 of the file, so that results of another file under the same name have another key.
    """

    path: str = setting("minilm", "file of captured tensors; `minilm` ships with numdev")
    layer: str | None = setting(None, "layer of a captured model; empty for all of them in turn")
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest(self.path, _written(self.path)))
        layers = _load(self.path, self.digest)
        if self.layer is not None and self.layer not in layers:
            raise BadInput("problem.source.layer", self.layer, f"{self.path} has {', '.join(layers)}")

    def draw(self, shape: Shape, scale: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of replicate `seed`, as FP64. `scale` is not used: captured tensors are as they are."""
        layers = self._layers()
        for layer in layers.values():
            if len(layer.q) * shape.kv_heads != len(layer.k) * shape.heads:
                mend = f"{self.path} has {len(layer.k)} heads of k for {len(layer.q)} of q; keep their ratio to problem.heads"
                raise BadInput("problem.kv_heads", shape.kv_heads, mend)
            self._check_size(layer.q, "q", shape.q)
            self._check_size(layer.k, "k", shape.kv)
        name, place = self._place(shape, seed)
        found = layers[name]
        return _heads(found.q, place, shape.q), _heads(found.k, place, shape.kv), _heads(found.v, place, shape.kv)

    def gradient(self, shape: Shape, seed: int) -> Tensor | None:
        """dO of replicate `seed`, as FP64; None where no chosen layer has one.

        Raises:
            BadInput: where only some of the chosen layers have one, or one does not have the shape of q or is not finite.
        """
        layers = self._layers()
        without = [name for name, layer in layers.items() if layer.do is None]
        if len(without) == len(layers):
            return None
        if without:
            mend = f"{without[0]} has no dO and other layers have; choose one with problem.source.layer, or capture dO of all"
            raise BadInput(_FIELD, self.path, mend)
        name, place = self._place(shape, seed)
        q, stored = layers[name].q, layers[name].do
        assert stored is not None
        do = _check(stored, self.path, f"{name}.do")
        if do.shape != q.shape:
            mend = f"{name} has q {tuple(q.shape)} and do {tuple(do.shape)}; the two must agree"
            raise BadInput(_FIELD, self.path, mend)
        return _heads(do, place, shape.q)

    @property
    def shape(self) -> Shape:
        """Of the smallest replicate: one head of k and v with the heads of q that share it, and the tokens of every layer."""
        layers = list(self._layers().values())
        queries, keys = (min(x.shape[-2] for x in each) for each in zip(*((layer.q, layer.k) for layer in layers), strict=True))
        q, k = layers[0].q, layers[0].k
        return Shape(heads=max(1, len(q) // len(k)), queries=queries, keys=keys, head_dim=q.shape[-1])

    def replicates(self, shape: Shape) -> int:
        """How many replicates of this shape the chosen layers have."""
        return sum(self._counts(shape).values())

    def cluster(self, shape: Shape, seed: int) -> str:
        """The layer of a replicate."""
        return self._place(shape, seed)[0]

    def _layers(self) -> dict[str, _Layer]:
        layers = _load(self.path, self.digest)
        return layers if self.layer is None else {self.layer: layers[self.layer]}

    def _counts(self, shape: Shape) -> dict[str, int]:
        """Replicates by layer."""
        return {name: len(layer.q) // (shape.batch * shape.heads) for name, layer in self._layers().items()}

    def _place(self, shape: Shape, seed: int) -> tuple[str, int]:
        """Layer of a replicate, and its number in there."""
        counts = self._counts(shape)
        rounds = [(place, name) for name, count in counts.items() for place in range(count)]
        if seed >= len(rounds):
            heads = ", ".join(f"{len(layer.q)} in {name}" for name, layer in self._layers().items())
            mend = f"{self.path} has heads of q: {heads}; so {len(rounds)} replicates of {shape.batch * shape.heads}"
            raise BadInput("seeds", seed + 1, f"{mend}; ask for fewer seeds or smaller problem.heads and problem.batch")
        place, name = sorted(rounds, key=lambda item: item[0])[seed]
        return name, place

    def _check_size(self, tensor: Tensor, name: str, size: tuple[int, int, int, int]) -> None:
        tokens, dim = size[2:]
        if tensor.shape[-1] != dim:
            raise BadInput("problem.head_dim", dim, f"{name} of {self.path} has head_dim {tensor.shape[-1]}")
        if tensor.shape[-2] < tokens:
            where = "problem.queries" if name == "q" else "problem.keys"
            raise BadInput(where, tokens, f"{name} of {self.path} has {tensor.shape[-2]} tokens; give at most that")


def _heads(tensor: Tensor, place: int, size: tuple[int, int, int, int]) -> Tensor:
    """The `place`-th `batch * heads` heads of a layer, and their first tokens, as `[batch, heads, tokens, head_dim]` in FP64."""
    batch, heads, tokens, _ = size
    return tensor[place * batch * heads : (place + 1) * batch * heads, :tokens].double().unflatten(0, (batch, heads))


@lru_cache(maxsize=4)
def _load(path: str, digest: str) -> dict[str, _Layer]:
    """The layers by name, of the file as it was when it had this digest."""
    if _digest(path, _written(path)) != digest:
        raise BadInput(_FIELD, path, "the file has changed since it was named; make the Captured again")
    tensors = _read(_file(path))
    layers: dict[str, _Layer] = {}
    for name in sorted(key.removesuffix(".q") for key in tensors if key.endswith(".q")):
        missing = [f"{name}.{part}" for part in "kv" if f"{name}.{part}" not in tensors]
        if missing:
            raise BadInput(_FIELD, path, f"it has {name}.q but no {missing[0]}")
        q, k, v = (_check(tensors[f"{name}.{part}"], path, f"{name}.{part}") for part in "qkv")
        layers[name] = _Layer(q, k, v, tensors.get(f"{name}.do"))
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            raise BadInput(_FIELD, path, f"{name} has {shapes}; k and v must agree, and q in head_dim")
    if not layers:
        raise BadInput(_FIELD, path, f"it needs tensors named <layer>.q, .k and .v; it has {', '.join(tensors) or 'none'}")
    return layers


def _file(path: str) -> Path:
    return Path(str(files("numdev") / "data" / "minilm_qkv.safetensors")) if path == "minilm" else Path(path)


def _written(path: str) -> tuple[int, int]:
    """When the file was last written, and its size: while they stay, its digest is not computed again."""
    file = _file(path)
    if file.suffix not in _SUFFIXES:
        raise BadInput(_FIELD, path, f"give a file that ends in {', '.join(_SUFFIXES)}, or minilm")
    if not file.is_file():
        raise BadInput(_FIELD, path, "there is no such file; give an existing path, or minilm")
    return file.stat().st_mtime_ns, file.stat().st_size


@lru_cache(maxsize=64)
def _digest(path: str, _: tuple[int, int]) -> str:
    return hashlib.sha256(_file(path).read_bytes()).hexdigest()


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        if file.suffix == ".npz":
            import numpy as np

            with np.load(file, allow_pickle=False) as archive:
                return {name: torch.from_numpy(archive[name]) for name in archive.files}
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # whatever the three formats' readers raise for what they cannot read
        raise _malformed(file, error) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise BadInput(_FIELD, str(file), "it must hold a dictionary of tensors named <layer>.q, .k and .v")
    return loaded


def _malformed(file: Path, error: Exception) -> BadInput:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadInput(_FIELD, str(file), f"it could not be read as {file.suffix} ({reason}); save it again")


def _check(tensor: Tensor, path: str, name: str) -> Tensor:
    if not tensor.is_floating_point() or tensor.ndim not in (3, 4):
        raise BadInput(_FIELD, path, f"{name} must be a floating tensor of 3 or 4 dimensions, not {tuple(tensor.shape)}")
    bad = int((~tensor.double().isfinite()).sum())
    if bad:
        raise BadInput(_FIELD, path, f"{name} holds {bad} NaN or infinite values; capture it again")
    return tensor.detach().flatten(0, -3)
