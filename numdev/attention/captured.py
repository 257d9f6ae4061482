"""q, k and v captured from a trained model, and dO where a backward pass was captured too."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from numdev.attention.mask import Bias, Mask
from numdev.attention.problem import Shape, Source
from numdev.errors import BadInput
from numdev.lazy import torch
from numdev.settings import setting

_SUFFIXES = (".safetensors", ".npz", ".pt")
_FIELD = "problem.source.path"


@dataclass(frozen=True, eq=False)
class _Layer:
    """q, k and v of a layer, each `[heads, tokens, head_dim]`; dO as the file has it, or None; mask and scale as it notes them.

    `unkept` is why the file could not keep the mask; empty where it could.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None
    mask: Mask = Mask()
    scale: float | None = None
    unkept: str = ""

    def lengths(self, shape: Shape) -> tuple[int, ...] | None:
        """The keys of each batch entry of a replicate; None where all exist.

        Raises:
            ValueError: where replicates differ, or heads of one batch entry of the problem come from several of the file.
        """
        count = len(self.q) // (shape.batch * shape.heads)
        if self.mask.key_lengths is None or count == 0:
            return None
        lengths = torch.tensor(self.mask.key_lengths).clamp(max=shape.keys)
        of_heads = lengths.repeat_interleave(len(self.q) // len(lengths))[: count * shape.batch * shape.heads]
        table = of_heads.view(count, shape.batch, shape.heads)
        if bool((table != table[:1, :, :1]).any()):
            raise ValueError
        return tuple(table[0, :, 0].tolist()) if int(table.min()) < shape.keys else None

    def bias(self, shape: Shape) -> Bias | None:
        """What is added to the scores of a replicate.

        Raises:
            ValueError: where replicates differ.
        """
        if self.mask.bias is None:
            return None
        values, count = self.mask.bias.values[..., : shape.queries, : shape.keys], len(self.q) // (shape.batch * shape.heads)
        batch, heads = values.shape[:2]
        batch = batch if batch > 1 else len(self.q) // heads
        of_heads = values.expand(batch, len(self.q) // batch, -1, -1).flatten(0, 1)[: count * shape.batch * shape.heads]
        table = of_heads.unflatten(0, (count, shape.batch, shape.heads))
        if bool((table != table[:1]).any()):
            raise ValueError
        return Bias(table[0])


@dataclass(frozen=True)
class Captured(Source):
    """Tensors `<layer>.q`, `<layer>.k`, `<layer>.v` of a file, each `[heads, tokens, head_dim]` or with a batch before it.

    `<layer>.do`, in the shape of q, is the gradient of the output. The backward pass is measured on it where the file has it.

    A file of `nd.capture` notes the mask and the scale of each layer. They are those of the problem unless it states
    others.

    A captured tensor has no seed: its replicates are its heads. A replicate takes `batch * heads` successive heads of one layer
    (batch entries of the file follow one another), and replicates alternate between the layers: first the first of each, then
    the second of each. So any number of replicates is spread over the layers as evenly as possible. Heads of one layer are
    alike, so the layer is the replicate's `cluster`. The first `queries` and `keys` tokens are used.

    Attributes:
        path: of a .safetensors, .npz or .pt file; `minilm` is the one that ships with numdev.
        layer: the name before `.q`; None takes all layers, in the order of their names.
        digest: SHA-256 of the file, so that results of another file under the same name have another key.
    """

    path: str = setting("minilm", "file of captured tensors; `minilm` ships with numdev")
    layer: str | None = setting(None, "layer of a captured model; empty for all of them in turn")
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest(self.path, *_written(self.path)))
        layers = _load(self.path, self.digest)
        if self.layer is not None and self.layer not in layers:
            raise BadInput("problem.source.layer", self.layer, f"{self.path} has {', '.join(layers)}")

    def draw(self, shape: Shape, scale: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The heads of replicate `seed`, as FP64. `scale` is not used: captured tensors are as they are."""
        layers = self._layers()
        for one in layers.values():
            if len(one.q) * shape.kv_heads != len(one.k) * shape.heads:
                hint = f"{self.path} has {len(one.k)} heads of k for {len(one.q)} of q; keep their ratio to problem.heads"
                raise BadInput("problem.kv_heads", shape.kv_heads, hint)
            for name, tensor, where, tokens in (("q", one.q, "queries", shape.queries), ("k", one.k, "keys", shape.keys)):
                if tensor.shape[-1] != shape.head_dim:
                    hint = f"{name} of {self.path} has head_dim {tensor.shape[-1]}"
                    raise BadInput("problem.head_dim", shape.head_dim, hint)
                if tensor.shape[-2] < tokens:
                    hint = f"{name} of {self.path} has {tensor.shape[-2]} tokens; give at most that"
                    raise BadInput(f"problem.{where}", tokens, hint)
        name, place = self._place(shape, seed)
        layer = layers[name]
        return _heads(layer.q, place, shape.q), _heads(layer.k, place, shape.kv), _heads(layer.v, place, shape.kv)

    def gradient(self, shape: Shape, seed: int) -> torch.Tensor | None:
        """dO of replicate `seed`, as FP64; None where no chosen layer has one, BadInput where only some have."""
        layers = self._layers()
        without = [name for name, layer in layers.items() if layer.do is None]
        if len(without) == len(layers):
            return None
        if without:
            hint = f"{without[0]} has no dO and other layers have; choose one with problem.source.layer, or capture dO of all"
            raise BadInput(_FIELD, self.path, hint)
        name, place = self._place(shape, seed)
        q, stored = layers[name].q, layers[name].do
        assert stored is not None
        do = _check(stored, self.path, f"{name}.do")
        if do.shape != q.shape:
            hint = f"{name} has q {tuple(q.shape)} and do {tuple(do.shape)}; the two must agree"
            raise BadInput(_FIELD, self.path, hint)
        return _heads(do, place, shape.q)

    def mask(self, shape: Shape, **fields: Any) -> Mask:
        """The mask that the file notes, some of its fields replaced; none where it notes none.

        Raises:
            BadInput: where the file could not keep the mask, the chosen layers or replicates differ, or the first tokens of a
                causal or windowed call stand elsewhere, unless the fields concerned are replaced.
        """
        layers = self._layers()
        unkept = {name: layer.unkept for name, layer in layers.items() if layer.unkept}
        if unkept:
            name, reason = next(iter(unkept.items()))
            if "causal" not in fields:
                hint = "state problem.causal=true or false to measure under that mask instead"
                raise BadInput(_FIELD, self.path, f"the file could not keep the mask of {name} ({reason}); {hint}")
            return Mask(**fields)
        masks = {name: layer.mask for name, layer in layers.items()}
        own = {
            field: self._common(field, {name: getattr(mask, field) for name, mask in masks.items()})
            for field in ("causal", "window")
            if field not in fields
        }
        for name, layer in layers.items():
            ahead = layer.k.shape[-2] - layer.q.shape[-2]
            if any(own.values()) and shape.keys - shape.queries != ahead:
                hint = f"give {ahead} more keys than queries, as {name} has, or state problem.causal and problem.window"
                raise BadInput("problem.keys", shape.keys, f"under the mask of {self.path} queries would move; {hint}")
        if "softcap" not in fields:
            own["softcap"] = self._common("softcap", {name: mask.softcap for name, mask in masks.items()})
        if "key_lengths" not in fields:
            try:
                lengths = {name: layer.lengths(shape) for name, layer in layers.items()}
            except ValueError:
                batch = max(len(mask.key_lengths or ()) for mask in masks.values())
                hint = f"give problem.batch={batch} and all heads of a layer, or state problem.key_lengths"
                raise BadInput(_FIELD, self.path, f"replicates have other numbers of keys; {hint}") from None
            own["key_lengths"] = self._common("key_lengths", lengths)
        if "causal" not in fields:
            try:
                own["bias"] = self._common("attn_mask", {name: layer.bias(shape) for name, layer in layers.items()})
            except ValueError:
                hint = "give problem.batch and problem.heads of a whole layer, or state problem.causal to measure without it"
                raise BadInput(_FIELD, self.path, f"replicates have other masks; {hint}") from None
        return Mask(**own | fields)

    def scale(self) -> float | None:
        """The scale that the file notes; None for 1/sqrt(head_dim), and where it notes none."""
        return self._common("scale", {name: layer.scale for name, layer in self._layers().items()})

    def _common(self, field: str, values: dict[str, Any]) -> Any:
        """The value that all layers share."""
        if len(set(values.values())) > 1:
            each = ", ".join(f"{name} {value}" for name, value in values.items())
            hint = f"choose one by problem.source.layer, or state problem.{field}"
            raise BadInput(_FIELD, self.path, f"its layers differ in {field} ({each}); {hint}")
        return next(iter(values.values()))

    @property
    def shape(self) -> Shape:
        """Of the smallest replicate: one head of k and v with the heads of q that share it, and the tokens of every layer."""
        layers = list(self._layers().values())
        queries, keys = min(layer.q.shape[-2] for layer in layers), min(layer.k.shape[-2] for layer in layers)
        q, k = layers[0].q, layers[0].k
        return Shape(heads=max(1, len(q) // len(k)), queries=queries, keys=keys, head_dim=q.shape[-1])

    def replicates(self, shape: Shape) -> int:
        return len(self._places(shape))

    def cluster(self, shape: Shape, seed: int) -> str:
        return self._place(shape, seed)[0]

    def _layers(self) -> dict[str, _Layer]:
        layers = _load(self.path, self.digest)
        return layers if self.layer is None else {self.layer: layers[self.layer]}

    def _places(self, shape: Shape) -> list[tuple[str, int]]:
        """The layer of each replicate, and its number in there: the first of each layer, then the second of each."""
        size = shape.batch * shape.heads
        of_layers = [(name, place) for name, layer in self._layers().items() for place in range(len(layer.q) // size)]
        return sorted(of_layers, key=lambda item: item[1])

    def _place(self, shape: Shape, seed: int) -> tuple[str, int]:
        places = self._places(shape)
        if seed >= len(places):
            heads = ", ".join(f"{len(layer.q)} in {name}" for name, layer in self._layers().items())
            hint = f"{self.path} has heads of q: {heads}; so {len(places)} replicates of {shape.batch * shape.heads}"
            raise BadInput("seeds", seed + 1, f"{hint}; ask for fewer seeds or smaller problem.heads and problem.batch")
        return places[seed]


def _heads(tensor: torch.Tensor, place: int, size: tuple[int, int, int, int]) -> torch.Tensor:
    """The `place`-th `batch * heads` heads of a layer, and their first tokens, as `[batch, heads, tokens, head_dim]` in FP64."""
    batch, heads, tokens, _ = size
    return tensor[place * batch * heads : (place + 1) * batch * heads, :tokens].double().unflatten(0, (batch, heads))


@lru_cache(maxsize=4)
def _load(path: str, digest: str) -> dict[str, _Layer]:
    """The layers by name, of the file as it was when it had this digest."""
    if _digest(path, *_written(path)) != digest:
        raise BadInput(_FIELD, path, "the file has changed since it was named; make the Captured again")
    tensors, notes = _read(_file(path))
    layers: dict[str, _Layer] = {}
    for name in sorted(key.removesuffix(".q") for key in tensors if key.endswith(".q")):
        missing = [f"{name}.{part}" for part in "kv" if f"{name}.{part}" not in tensors]
        if missing:
            raise BadInput(_FIELD, path, f"it has {name}.q but no {missing[0]}")
        q, k, v = (_check(tensors[f"{name}.{part}"], path, f"{name}.{part}") for part in "qkv")
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            raise BadInput(_FIELD, path, f"{name} has {shapes}; k and v must agree, and q in head_dim")
        layer = _Layer(q, k, v, tensors.get(f"{name}.do"), **_mask_and_scale(path, name, notes.get(name, "")))
        if (mask := tensors.get(f"{name}.mask")) is not None:
            layer = replace(layer, mask=replace(layer.mask, bias=Bias(mask)))
        layers[name] = layer
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
def _digest(path: str, *written: int) -> str:
    return hashlib.sha256(_file(path).read_bytes()).hexdigest()


def _read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, and the notes on the layers, which safetensors alone have. No code in a file is run."""
    from numpy import load
    from safetensors import safe_open

    try:
        if file.suffix == ".npz":
            with load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}, {}
        if file.suffix == ".pt":
            items = torch.load(file, map_location="cpu", weights_only=True).items()
            return {name: tensor for name, tensor in items if isinstance(tensor, torch.Tensor)}, {}
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata() or {})  # noqa: SIM118
    except MemoryError:
        raise
    except Exception as error:  # whatever the three readers raise for what they cannot read
        reason = "".join(str(error).splitlines()[:1]).partition(". ")[0] or type(error).__name__
        raise BadInput(
            _FIELD, str(file), f"it could not be read as {file.suffix} ({reason}); save the tensors by name again"
        ) from None


def _check(tensor: torch.Tensor, path: str, name: str) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.ndim not in (3, 4):
        raise BadInput(_FIELD, path, f"{name} must be a floating tensor of 3 or 4 dimensions, not {tuple(tensor.shape)}")
    bad = int((~tensor.double().isfinite()).sum())
    if bad:
        raise BadInput(_FIELD, path, f"{name} holds {bad} NaN or infinite values; capture it again")
    return tensor.detach().flatten(0, -3)


def _mask_and_scale(path: str, name: str, text: str) -> dict[str, Any]:
    """Mask and scale of a layer from the note that `nd.capture` wrote; nothing of other metadata."""
    try:
        note = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(note, dict) or "mask" not in note:
        return {}
    try:
        scale, mask = None if note.get("scale") is None else float(note["scale"]), note["mask"]
        if isinstance(mask, str):
            return {"scale": scale, "unkept": mask}
        lengths = mask["key_lengths"]
        cap = mask.get("softcap")
        kept = Mask(bool(mask["causal"]), mask["window"], None if lengths is None else tuple(map(int, lengths)), softcap=cap)
        return {"mask": kept, "scale": scale}
    except (TypeError, KeyError, ValueError) as error:
        raise BadInput(_FIELD, path, f"its note on {name} cannot be read ({error}); capture it again") from None
