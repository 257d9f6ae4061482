"""Captured tensors: what ships, the three file formats, and every file that cannot be used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from numdev.attention import captured
from numdev.attention.captured import Captured
from numdev.attention.mask import Mask
from numdev.attention.problem import Problem, Shape, Source
from numdev.errors import BadInput
from numdev.results.record import describe
from numdev.settings import make

Layers = dict[str, Tensor]


def layers(*names: str, heads: int = 4, kv_heads: int = 4, tokens: int = 6, dim: int = 3) -> Layers:
    generator = torch.Generator().manual_seed(len(names) + heads)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {f"{n}.{p}": torch.randn(sizes[p], tokens, dim, generator=generator) for n in names for p in "qkv"}


def save(path: Path, tensors: Layers) -> str:
    match path.suffix:
        case ".npz":
            np.savez(path, **{name: x.numpy() for name, x in tensors.items()})  # type: ignore[arg-type]
        case ".pt":
            torch.save(tensors, path)
        case _:
            save_file(tensors, path)
    return str(path)


def refused(make: Callable[[], object], *, field: str = "problem.source.path", hint: str = "") -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert caught.value.field == field
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


def test_the_tensors_that_ship() -> None:
    """Two layers of 12 heads, 256 tokens and head_dim 32; 24 replicates of one head, 2 of a whole layer."""
    path = str(files("numdev") / "data" / "minilm_qkv.safetensors")
    shipped = load_file(path)
    source, shape = Captured(), Shape(queries=256, keys=256, head_dim=32)
    assert source.replicates(shape) == 24
    assert [source.cluster(shape, seed) for seed in range(24)] == ["layer0", "layer5"] * 12
    whole = Captured(layer="layer5").draw(Shape(heads=12, kv_heads=12, queries=256, keys=256, head_dim=32), 1.0, 0)
    assert torch.equal(whole[0][0], shipped["layer5.q"].double())
    assert isinstance(source, Source)
    problem = Problem(source, shape)
    assert (problem.mask, problem.scale) == (Mask(), None), "its metadata note no mask of a layer"


def with_do(tensors: Layers) -> Layers:
    """As `nd.capture` writes them of a training step; here dO is q with the heads in another order."""
    return tensors | {f"{name.removesuffix('.q')}.do": x.roll(1, -3) for name, x in tensors.items() if name.endswith(".q")}


@pytest.mark.parametrize(("suffix", "dtype"), [(".safetensors", torch.bfloat16), (".npz", torch.half), (".pt", torch.bfloat16)])
@pytest.mark.parametrize("ndim", [3, 4])
def test_replicates_are_successive_heads_of_the_layers_in_turn(
    tmp_path: Path, suffix: str, dtype: torch.dtype, ndim: int
) -> None:
    """A batch before the heads is one row of heads. Four heads share each head of k, and stay with it."""
    flat = {name: t.to(dtype) for name, t in with_do(layers("b", "a", heads=8, kv_heads=2)).items()}
    stored = flat if ndim == 3 else {name: t.unflatten(0, (2, -1)).contiguous() for name, t in flat.items()}
    source = Captured(save((tmp_path / "x").with_suffix(suffix), stored))
    shape = Shape(heads=4, kv_heads=1, queries=4, keys=5, head_dim=3)
    sizes = {"q": (4, 4), "k": (1, 5), "v": (1, 5), "do": (4, 4)}
    for seed in range(4):
        name, at, do = "ab"[seed % 2], seed // 2, source.gradient(shape, seed)
        assert do is not None
        for tensor, (part, (heads, tokens)) in zip((*source.draw(shape, 1.0, seed), do), sizes.items(), strict=True):
            assert tensor.dtype == torch.float64
            assert torch.equal(tensor, flat[f"{name}.{part}"][None, heads * at : heads * (at + 1), :tokens].double())
    alone = Captured(source.path, "b").draw(shape, 1.0, 0)
    assert all(torch.equal(one, other) for one, other in zip(alone, source.draw(shape, 1.0, 1), strict=True))
    refused(lambda: Captured(source.path, "c"), field="problem.source.layer", hint="a, b")
    for heads, kv_heads in ((1, 1), (2, 1), (8, 8)):
        other = Shape(heads=heads, kv_heads=kv_heads, queries=6, keys=6, head_dim=3)
        refused(lambda shape=other: source.draw(shape, 1.0, 0), field="problem.kv_heads", hint="2 heads of k")  # type: ignore[misc]
    assert Captured().gradient(Shape(queries=4, keys=4, head_dim=32), 0) is None


HALF = Shape(heads=2, kv_heads=2, queries=6, keys=6, head_dim=3)


@pytest.mark.parametrize(
    ("shape", "seed", "field", "hint"),
    [
        (Shape(heads=2, kv_heads=2, queries=6, keys=6, head_dim=4), 0, "problem.head_dim", "head_dim 3"),
        (Shape(heads=2, kv_heads=2, queries=6, keys=7, head_dim=3), 0, "problem.keys", "6 tokens"),
        (HALF, 2, "seeds", "heads of q: 4 in a; so 2 replicates of 2"),
        (Shape(batch=5, queries=6, keys=6, head_dim=3), 0, "seeds", "4 in a; so 0 replicates of 5"),
    ],
)
def test_what_the_file_cannot_serve(tmp_path: Path, shape: Shape, seed: int, field: str, hint: str) -> None:
    source = Captured(save(tmp_path / "x.safetensors", layers("a")))
    assert source.draw(HALF, 1.0, 1)[0].shape == HALF.q
    refused(lambda: Problem(source, shape).inputs(seed), field=field, hint=hint)


def test_a_gradient_that_cannot_be_used(tmp_path: Path) -> None:
    """It is refused where it is asked for; q, k and v of the same file are served."""
    stored, shape = with_do(layers("a", "b")), Shape(queries=6, keys=6, head_dim=3)
    partial = {name: x for name, x in stored.items() if name != "b.do"}
    for number, (changed, hint) in enumerate(
        [
            (stored | {"a.do": stored["a.do"][:, :5].contiguous()}, r"a has q (4, 6, 3) and do (4, 5, 3)"),
            (stored | {"a.do": stored["a.do"] / 0}, "a.do holds 72 NaN or infinite values"),
            (partial, "b has no dO"),
        ]
    ):
        source = Captured(save(tmp_path / f"{number}.safetensors", changed))
        refused(lambda source=source: source.gradient(shape, 0), hint=hint)  # type: ignore[misc]
        assert source.draw(shape, 1.0, 0)[0].shape == shape.q
    assert Captured(str(tmp_path / "2.safetensors"), "a").gradient(shape, 0) is not None
    assert Captured(str(tmp_path / "2.safetensors"), "b").gradient(shape, 0) is None


CHANGES: list[tuple[Callable[[Layers], Layers], str]] = [
    (lambda t: {"query": t["a.q"], "key": t["a.k"]}, "it has key, query"),
    (lambda t: {n: x for n, x in t.items() if n != "a.k"}, "a.q but no a.k"),
    (lambda t: t | {"a.v": t["a.v"][:, :5].contiguous()}, "k and v must agree"),
    (lambda t: t | {"a.q": t["a.q"][0]}, "3 or 4 dimensions, not (6, 3)"),
    (lambda t: t | {"a.q": t["a.q"] / 0}, "a.q holds 72 NaN or infinite values"),
]


def test_files_and_contents_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """None, of another suffix, garbage, cut short, with an object that only running code would make, or of other tensors."""
    refused(lambda: Captured(str(tmp_path / "none.safetensors")), hint="no such file")
    refused(lambda: Captured(str(tmp_path / "x.bin")), hint="ends in .safetensors, .npz, .pt")
    torch.save({"a.q": Path("x")}, tmp_path / "code.pt")
    np.savez(tmp_path / "code.npz", **{"a.q": np.array([Path("x")])})  # type: ignore[arg-type]
    torch.save(torch.ones(3), tmp_path / "alone.pt")
    for name in ("code.pt", "code.npz", "alone.pt"):
        refused(lambda name=name: Captured(str(tmp_path / name)), hint="could not be read")  # type: ignore[misc]
    for path in map(tmp_path.joinpath, ("x.safetensors", "x.npz", "x.pt")):
        whole = Path(save(path, layers("a", "b"))).read_bytes()
        for content in (b"", b"garbage", b"\x80\x02}q\x00.", *(whole[: len(whole) * tenths // 10] for tenths in (1, 5, 9))):
            path.write_bytes(content)
            refused(lambda path=path: Captured(str(path)), hint="")  # type: ignore[misc]
    for number, (change, hint) in enumerate(CHANGES):
        changed = save(tmp_path / f"{number}.safetensors", change(layers("a")))
        refused(lambda changed=changed: Captured(changed), hint=hint)  # type: ignore[misc]


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    """Of a file written anew under its name, in one process, nothing of the old one is served under the new digest."""
    shape, path = Shape(queries=6, keys=6, head_dim=3), tmp_path / "x.safetensors"
    old = Captured(save(path, layers("a")))
    assert old.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert describe(old) == {"type": "Captured", "path": str(path), "layer": None, "digest": old.digest}
    first = old.draw(shape, 1.0, 0)[0]
    save(path, {name: t + 1 for name, t in layers("a").items()})
    os.utime(path, ns=(1, 1))  # a file system's clock may be too coarse to tell the two apart
    new = Captured(str(path))
    assert new != old
    assert torch.equal(new.draw(shape, 1.0, 0)[0], (layers("a")["a.q"] + 1)[None, :1].double())
    assert torch.equal(old.draw(shape, 1.0, 0)[0], first), "still in memory as it was"
    captured._load.cache_clear()
    refused(lambda: old.draw(shape, 1.0, 0), hint="has changed")


SHAPE = Shape(queries=6, keys=6, head_dim=3)
CAUSAL = {"causal": True, "window": None, "key_lengths": None}


def noted(path: Path, **notes: object) -> Captured:
    """A file whose metadata hold a note of each layer, as text where it is text."""
    text = {name: note if isinstance(note, str) else json.dumps(note) for name, note in notes.items()}
    save_file(layers(*notes), path, text)
    return Captured(str(path))


def built(source: Captured, shape: Shape = SHAPE, **stated: object) -> Problem:
    """As the command line builds it."""
    sizes = {name: getattr(shape, name) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")}
    return make(Problem, {"source": source, **sizes, **stated}, "problem")


def test_mask_and_scale_of_the_file_apply_unless_others_are_stated(tmp_path: Path) -> None:
    source = noted(tmp_path / "a.safetensors", a={"scale": 0.5, "mask": CAUSAL | {"window": 4}})
    for problem in (Problem(source, SHAPE), built(source)):
        assert (problem.mask, problem.scale) == (Mask(causal=True, window=4), 0.5)
    assert built(source, causal=False).mask == Mask(window=4)
    assert built(source, window=2, key_lengths=[5]).mask == Mask(True, 2, (5,))
    assert built(source, scale=0.25).scale == 0.25
    assert Problem(source, SHAPE, Mask()).mask == Mask()
    for number, note in enumerate(["none", "[1]", "null", '{"family": "BERT"}']):
        problem = Problem(noted(tmp_path / f"{number}.safetensors", a=note), SHAPE)
        assert (problem.mask, problem.scale) == (Mask(), None), "other metadata say nothing"
    lost = noted(tmp_path / "c.safetensors", a={"scale": 1, "mask": "it adds to the scores"})
    refused(lambda: Problem(lost, SHAPE), hint="could not keep the mask of a (it adds to the scores); state problem.causal")
    refused(lambda: noted(tmp_path / "d.safetensors", a={"mask": {"causal": True}}), hint="its note on a cannot be read")


def test_layers_that_differ_are_refused_unless_one_is_chosen_or_the_field_stated(tmp_path: Path) -> None:
    notes = {"a": {"scale": 0.5, "mask": CAUSAL}, "b": {"scale": 0.25, "mask": CAUSAL | {"causal": False}}}
    source = noted(tmp_path / "a.safetensors", **notes)
    refused(lambda: Problem(source, SHAPE), hint="its layers differ in causal (a True, b False); choose one by")
    refused(lambda: built(source, causal=True), hint="its layers differ in scale (a 0.5, b 0.25)")
    assert built(source, causal=True, scale=1.0).mask == Mask(causal=True)
    one = Problem(Captured(source.path, "b"), SHAPE)
    assert (one.mask, one.scale) == (Mask(), 0.25)


def test_key_lengths_are_those_of_the_batch_entries_of_a_replicate(tmp_path: Path) -> None:
    """Two entries of 2 heads each with 5 and 3 keys: replicates of less than a layer would differ."""
    mask = {"causal": False, "window": None, "key_lengths": [5, 3]}
    source = noted(tmp_path / "a.safetensors", a={"scale": None, "mask": mask})
    assert Problem(source, Shape(2, 2, 2, 6, 6, 3)).mask == Mask(key_lengths=(5, 3))
    assert Problem(source, Shape(2, 2, 2, 6, 4, 3)).mask == Mask(key_lengths=(4, 3))
    assert Problem(source, Shape(2, 2, 2, 6, 3, 3)).mask == Mask()
    assert Problem(source, Shape(4, 1, 1, 6, 6, 3)).mask == Mask(key_lengths=(5, 5, 3, 3))
    for shape in (SHAPE, Shape(1, 4, 4, 6, 6, 3), Shape(1, 2, 2, 6, 6, 3)):
        hint = "give problem.batch=2 and all heads of a layer"
        refused(lambda shape=shape: Problem(source, shape), hint=hint)  # type: ignore[misc]
    assert built(source, key_lengths=[6]).mask == Mask(key_lengths=(6,))


def test_first_tokens_stay_where_the_mask_had_them(tmp_path: Path) -> None:
    """Query 0 of the file sees key 0; among 3 queries and 6 keys it would see four."""
    source = noted(tmp_path / "a.safetensors", a={"scale": None, "mask": CAUSAL})
    assert Problem(source, Shape(queries=3, keys=3, head_dim=3)).mask == Mask(causal=True)
    fewer = Shape(queries=3, keys=6, head_dim=3)
    refused(lambda: Problem(source, fewer), field="problem.keys", hint="give 0 more keys than queries")
    assert built(source, fewer, causal=True).mask == Mask(causal=True)
