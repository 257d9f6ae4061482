"""Captured tensors: what ships, the three file formats, and every file that cannot be used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
SUFFIXES = (".safetensors", ".pt", ".npz")


def layers(
    *names: str, heads: int = 4, kv_heads: int = 4, tokens: int = 6, dim: int = 3, dtype: torch.dtype = torch.float32
) -> Layers:
    generator = torch.Generator().manual_seed(len(names) + heads)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {f"{n}.{p}": torch.randn(sizes[p], tokens, dim, generator=generator).to(dtype) for n in names for p in "qkv"}


def save(path: Path, tensors: Layers) -> str:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    elif path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        np.savez(path, **{name: t.numpy() for name, t in tensors.items()})  # type: ignore[arg-type]
    return str(path)


def refused(make: Callable[[], object], *, field: str = "problem.source.path", mend: str = "") -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert caught.value.field == field
    assert mend in caught.value.mend
    assert "\n" not in str(caught.value)


def test_the_tensors_that_ship() -> None:
    """Two layers of 12 heads, 256 tokens and head_dim 32; 24 replicates of one head, 2 of a whole layer."""
    path = str(files("numdev") / "data" / "minilm_qkv.safetensors")
    shipped = load_file(path)
    assert {name: tuple(t.shape) for name, t in shipped.items()} == {
        f"layer{i}.{part}": (12, 256, 32) for i in (0, 5) for part in "qkv"
    }
    source, shape = Captured(), Shape(queries=256, keys=256, head_dim=32)
    assert source.replicates(shape) == 24
    for seed in range(24):
        layer, head = ("layer0", "layer5")[seed % 2], seed // 2
        assert source.cluster(shape, seed) == layer
        for tensor, part in zip(source.draw(shape, 1.0, seed), "qkv", strict=True):
            assert tensor.dtype == torch.float64
            assert torch.equal(tensor[0, 0], shipped[f"{layer}.{part}"][head].double())
    whole = Captured(layer="layer5").draw(Shape(heads=12, kv_heads=12, queries=256, keys=256, head_dim=32), 1.0, 0)
    assert torch.equal(whole[0][0], shipped["layer5.q"].double())
    assert source.digest == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert isinstance(source, Source)
    problem = Problem(source, shape)
    assert (problem.mask, problem.scale) == (Mask(), None), "its metadata note no mask of a layer"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("ndim", [3, 4])
def test_formats_and_layouts(tmp_path: Path, suffix: str, ndim: int) -> None:
    """A batch before the heads is one row of heads; replicates are successive heads of a layer, and go round the layers."""
    flat = layers("a", "b")
    stored = flat if ndim == 3 else {name: t.unflatten(0, (2, 2)).contiguous() for name, t in flat.items()}
    source = Captured(save(tmp_path / f"x{suffix}", stored))
    shape = Shape(heads=2, kv_heads=2, queries=4, keys=5, head_dim=3)
    for seed in range(4):
        name, start = "ab"[seed % 2], 2 * (seed // 2)
        for tensor, part, tokens in zip(source.draw(shape, 1.0, seed), "qkv", (4, 5, 5), strict=True):
            assert torch.equal(tensor, flat[f"{name}.{part}"][None, start : start + 2, :tokens].double())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_any_number_of_replicates_is_spread_over_the_layers(tmp_path_factory: Any, counts: list[int], heads: int) -> None:
    """Each head once at most, none across two layers, and as many of each layer as the smallest allows."""
    stored = {f"l{i}.{part}": torch.arange(count)[:, None, None] + 100.0 * i for i, count in enumerate(counts) for part in "qkv"}
    source = Captured(save(tmp_path_factory.mktemp("x") / "x.npz", stored))
    shape = Shape(heads=heads, kv_heads=heads, queries=1, keys=1, head_dim=1)
    whole = [count // heads for count in counts]
    assert source.replicates(shape) == sum(whole)
    seen: list[float] = []
    taken = [0] * len(counts)
    for seed in range(sum(whole)):
        values = source.draw(shape, 1.0, seed)[0].flatten().tolist()
        layers = {int(value // 100) for value in values}
        assert source.cluster(shape, seed) == f"l{layers.pop()}"
        assert not layers
        seen += values
        taken[int(values[0] // 100)] += 1
        open_ = [done for done, most in zip(taken, whole, strict=True) if done < most]
        assert not open_ or max(taken) - min(open_) <= 1
    assert len(set(seen)) == len(seen) == heads * sum(whole)


def test_batch_entries_are_successive_heads_too() -> None:
    shape = Shape(batch=3, heads=4, kv_heads=4, queries=2, keys=2, head_dim=32)
    q, _, _ = Captured(layer="layer0").draw(shape, 1.0, 0)
    one, _, _ = Captured(layer="layer0").draw(Shape(queries=2, keys=2, head_dim=32), 1.0, 7)
    assert torch.equal(q[1, 3], one[0, 0])


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_floating_type_is_exact(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    stored = layers("a", dtype=dtype)
    q, k, v = Captured(save(tmp_path / f"x{suffix}", stored)).draw(Shape(queries=6, keys=6, head_dim=3), 1.0, 2)
    for tensor, part in ((q, "q"), (k, "k"), (v, "v")):
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor[0, 0], stored[f"a.{part}"][2].double())


def test_tensors_of_a_graph_come_without_it(tmp_path: Path) -> None:
    """Captured by a hook and saved as they were, they ask for gradients."""
    stored = {name: t.requires_grad_() for name, t in layers("a").items()}
    drawn = Captured(save(tmp_path / "x.pt", stored)).draw(Shape(queries=2, keys=2, head_dim=3), 1.0, 0)
    assert not any(t.requires_grad for t in drawn)


def test_layers(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", layers("b", "a", "model.layers.0.attention"))
    shape = Shape(heads=4, kv_heads=4, queries=6, keys=6, head_dim=3)
    for seed, name in enumerate(["a", "b", "model.layers.0.attention"]):
        chosen = Captured(path, name).draw(shape, 1.0, 0)
        in_order = Captured(path).draw(shape, 1.0, seed)
        assert all(torch.equal(one, other) for one, other in zip(chosen, in_order, strict=True))
    refused(lambda: Captured(path, "c"), field="problem.source.layer", mend="a, b, model.layers.0.attention")


def test_layers_of_different_length(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", layers("a", tokens=4) | layers("b", tokens=6))
    q, _, _ = Captured(path).draw(Shape(heads=4, kv_heads=4, queries=4, keys=4, head_dim=3), 1.0, 1)
    assert torch.equal(q[0], torch.load(path)["b.q"][:, :4].double())
    refused(lambda: Captured(path).draw(Shape(queries=5, keys=4, head_dim=3), 1.0, 0), field="problem.queries", mend="4 tokens")
    path = save(tmp_path / "y.pt", layers("a", dim=3) | layers("b", dim=5))
    refused(lambda: Captured(path).draw(Shape(queries=5, keys=4, head_dim=3), 1.0, 0), field="problem.head_dim", mend="5")


def test_grouped_heads_stay_with_their_keys(tmp_path: Path) -> None:
    """Four heads share each head of k: replicates that took other shares would pair q with the wrong k."""
    stored = layers("a", heads=8, kv_heads=2)
    source = Captured(save(tmp_path / "x.pt", stored))
    q, k, _ = source.draw(Shape(heads=4, kv_heads=1, queries=6, keys=6, head_dim=3), 1.0, 1)
    assert torch.equal(q[0], stored["a.q"][4:].double())
    assert torch.equal(k[0], stored["a.k"][1:].double())
    for heads, kv_heads in ((1, 1), (2, 1), (8, 8)):
        shape = Shape(heads=heads, kv_heads=kv_heads, queries=6, keys=6, head_dim=3)
        refused(lambda shape=shape: source.draw(shape, 1.0, 0), field="problem.kv_heads", mend="2 heads of k")  # type: ignore[misc]


SHAPE = Shape(heads=2, kv_heads=2, queries=6, keys=6, head_dim=3)


@pytest.mark.parametrize(
    ("shape", "seed", "field", "mend"),
    [
        (Shape(heads=2, kv_heads=2, queries=6, keys=6, head_dim=4), 0, "problem.head_dim", "head_dim 3"),
        (Shape(heads=2, kv_heads=2, queries=7, keys=6, head_dim=3), 0, "problem.queries", "6 tokens"),
        (Shape(heads=2, kv_heads=2, queries=6, keys=7, head_dim=3), 0, "problem.keys", "6 tokens"),
        (SHAPE, 2, "seeds", "heads of q: 4 in a; so 2 replicates of 2"),
        (Shape(heads=8, kv_heads=8, queries=6, keys=6, head_dim=3), 0, "seeds", "4 in a; so 0 replicates of 8"),
        (Shape(batch=5, queries=6, keys=6, head_dim=3), 0, "seeds", "4 in a; so 0 replicates of 5"),
    ],
)
def test_what_the_file_cannot_serve(tmp_path: Path, shape: Shape, seed: int, field: str, mend: str) -> None:
    source = Captured(save(tmp_path / "x.pt", layers("a")))
    assert source.draw(SHAPE, 1.0, 1)[0].shape == SHAPE.q
    refused(lambda: Problem(source, shape).inputs(seed), field=field, mend=mend)


def with_do(tensors: Layers) -> Layers:
    """As `nd.capture` writes them of a training step; here dO is q with the heads in another order."""
    return tensors | {f"{name.removesuffix('.q')}.do": x.roll(1, -3) for name, x in tensors.items() if name.endswith(".q")}


def test_the_gradient_of_a_replicate_is_of_its_heads(tmp_path: Path) -> None:
    """dO of the same layer, heads and first tokens as q, with a batch before the heads or without."""
    flat = with_do(layers("a", "b", heads=8, kv_heads=2))
    shape = Shape(heads=4, kv_heads=1, queries=5, keys=6, head_dim=3)
    for name, stored in (("flat", flat), ("deep", {name: t.unflatten(0, (2, -1)).contiguous() for name, t in flat.items()})):
        source = Captured(save(tmp_path / f"{name}.safetensors", stored))
        for seed in range(4):
            do = source.gradient(shape, seed)
            assert do is not None
            assert do.dtype == torch.float64
            start = 4 * (seed // 2)
            assert torch.equal(do, flat[f"{'ab'[seed % 2]}.do"][None, start : start + 4, :5].double())
    assert Captured().gradient(Shape(queries=4, keys=4, head_dim=32), 0) is None


def test_a_gradient_that_cannot_be_used(tmp_path: Path) -> None:
    """It is refused where it is asked for; q, k and v of the same file are served."""
    stored, shape = with_do(layers("a", "b")), Shape(queries=6, keys=6, head_dim=3)
    partial = {name: x for name, x in stored.items() if name != "b.do"}
    for number, (changed, mend) in enumerate(
        [
            (stored | {"a.do": stored["a.do"][:, :5]}, r"a has q (4, 6, 3) and do (4, 5, 3)"),
            (stored | {"a.do": stored["a.do"][..., :2]}, "do (4, 6, 2)"),
            (stored | {"a.do": stored["a.do"] / 0}, "a.do holds 72 NaN or infinite values"),
            (stored | {"a.do": stored["a.do"].int()}, "a.do must be a floating tensor"),
            (partial, "b has no dO"),
        ]
    ):
        source = Captured(save(tmp_path / f"{number}.pt", changed))
        refused(lambda source=source: source.gradient(shape, 0), mend=mend)  # type: ignore[misc]
        assert source.draw(shape, 1.0, 0)[0].shape == shape.q
    assert Captured(str(tmp_path / "4.pt"), "a").gradient(shape, 0) is not None
    assert Captured(str(tmp_path / "4.pt"), "b").gradient(shape, 0) is None


def test_missing_files_and_other_suffixes(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        refused(lambda suffix=suffix: Captured(str(tmp_path / f"none{suffix}")), mend="no such file")  # type: ignore[misc]
    folder = tmp_path / "folder.pt"
    folder.mkdir()
    refused(lambda: Captured(str(folder)), mend="no such file")
    for name in ("x.bin", "x", "x.safetensors.gz", "minilm2"):
        (tmp_path / name).write_bytes(b"")
        refused(lambda name=name: Captured(str(tmp_path / name)), mend=".safetensors, .pt, .npz")  # type: ignore[misc]


GARBAGE = [b"", b"\0", b"garbage", b"PK\3\4" + b"x" * 50, b"\x80\x02}q\x00.", b"\xff" * 300, b"\x93NUMPY\1\0", b"{}" * 40]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    refused(lambda: Captured(str(path)))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_files_are_refused(tmp_path: Path, suffix: str) -> None:
    whole = Path(save(tmp_path / f"whole{suffix}", layers("a", "b"))).read_bytes()
    for tenths in range(1, 10):
        path = tmp_path / f"cut{tenths}{suffix}"
        path.write_bytes(whole[: len(whole) * tenths // 10])
        refused(lambda path=path: Captured(str(path)), mend=f"could not be read as {suffix}")  # type: ignore[misc]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, suffix: str) -> None:
    for other in SUFFIXES:
        if other != suffix:
            path = tmp_path / f"from_{other[1:]}{suffix}"
            path.write_bytes(Path(save(tmp_path / f"x{other}", layers("a"))).read_bytes())
            refused(lambda path=path: Captured(str(path)))  # type: ignore[misc]


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.touched}",)


def test_pickled_objects_are_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch.save(layers("a") | {"trap": Trap(touched)}, tmp_path / "x.pt")
    refused(lambda: Captured(str(tmp_path / "x.pt")), mend="could not be read as .pt")
    np.savez(tmp_path / "x.npz", trap=np.array([Trap(touched)], dtype=object))
    refused(lambda: Captured(str(tmp_path / "x.npz")), mend="could not be read as .npz")
    assert not touched.exists()


@pytest.mark.parametrize("content", [[torch.zeros(2, 2, 2)], torch.zeros(2, 2, 2), {"a.q": 3.0}, {"a": {"q": torch.zeros(2)}}])
def test_a_pt_file_must_hold_a_dictionary_of_tensors(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    refused(lambda: Captured(str(tmp_path / "x.pt")), mend="dictionary of tensors")


def test_npz_files_of_other_things_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "text.npz", note=np.array(["text"]))
    refused(lambda: Captured(str(tmp_path / "text.npz")), mend="could not be read as .npz")
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    refused(lambda: Captured(str(tmp_path / "single.npz")), mend="could not be read as .npz")


@pytest.mark.parametrize(
    ("change", "mend"),
    [
        (lambda t: {}, "it has none"),
        (lambda t: {"query": t["a.q"], "key": t["a.k"]}, "it has query, key"),
        (lambda t: {n: x for n, x in t.items() if n != "a.k"}, "a.q but no a.k"),
        (lambda t: {n: x for n, x in t.items() if n != "a.v"}, "a.q but no a.v"),
        (lambda t: t | {"a.v": t["a.v"][:, :5]}, "k and v must agree"),
        (lambda t: t | {"a.v": t["a.v"][:3]}, "k and v must agree"),
        (lambda t: t | {"a.q": t["a.q"][..., :2]}, "q in head_dim"),
        (lambda t: t | {"a.q": t["a.q"][0]}, "3 or 4 dimensions, not (6, 3)"),
        (lambda t: t | {"a.q": t["a.q"][None, None]}, "3 or 4 dimensions"),
        (lambda t: t | {"a.k": t["a.k"].int()}, "floating tensor"),
        (lambda t: t | {"a.v": t["a.v"].where(t["a.v"] < 0, float("nan"))}, "NaN or infinite values"),
        (lambda t: t | {"a.q": t["a.q"] / 0}, "a.q holds 72 NaN or infinite values"),
    ],
)
def test_contents_that_cannot_be_used(tmp_path: Path, change: Callable[[Layers], Layers], mend: str) -> None:
    stored = {name: t.contiguous() for name, t in change(layers("a")).items()}
    refused(lambda: Captured(save(tmp_path / "x.pt", stored)), mend=mend)


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    one = Captured(save(tmp_path / "x.pt", layers("a")))
    copy = tmp_path / "y.pt"
    copy.write_bytes((tmp_path / "x.pt").read_bytes())
    assert one.digest == Captured(str(copy)).digest == hashlib.sha256(copy.read_bytes()).hexdigest()
    assert describe(one) == {"type": "Captured", "path": str(tmp_path / "x.pt"), "layer": None, "digest": one.digest}


def test_a_file_written_anew_is_another_source(tmp_path: Path) -> None:
    """Under the same name, in one process: nothing of the old file may be served under the digest of the new one."""
    shape = Shape(queries=6, keys=6, head_dim=3)
    old = Captured(save(tmp_path / "x.pt", layers("a")))
    first = old.draw(shape, 1.0, 0)[0]
    save(tmp_path / "x.pt", {name: t + 1 for name, t in layers("a").items()})
    os.utime(tmp_path / "x.pt", ns=(1, 1))  # a file system's clock may be too coarse to tell the two apart
    new = Captured(str(tmp_path / "x.pt"))
    assert new != old
    assert new.digest != old.digest
    assert torch.equal(new.draw(shape, 1.0, 0)[0], (layers("a")["a.q"] + 1)[None, :1].double())
    assert torch.equal(old.draw(shape, 1.0, 0)[0], first), "still in memory as it was"
    captured._load.cache_clear()
    refused(lambda: old.draw(shape, 1.0, 0), mend="has changed")


SHAPE = Shape(queries=6, keys=6, head_dim=3)
CAUSAL = {"causal": True, "window": None, "key_lengths": None}


def noted(path: Path, stored: Layers | None = None, **notes: object) -> Captured:
    """A file whose metadata hold a note of each layer, as text where it is text."""
    text = {name: note if isinstance(note, str) else json.dumps(note) for name, note in notes.items()}
    save_file(layers(*notes) if stored is None else stored, path, text)
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


@pytest.mark.parametrize("note", ["none", "[1]", "3", "null", '{"family": "BERT"}'])
def test_other_metadata_say_nothing(tmp_path: Path, note: str) -> None:
    problem = Problem(noted(tmp_path / "a.safetensors", a=note), SHAPE)
    assert (problem.mask, problem.scale) == (Mask(), None)


def test_notes_that_hold_no_mask(tmp_path: Path) -> None:
    refused(
        lambda: Problem(noted(tmp_path / "c.safetensors", a={"scale": 1, "mask": "it adds to the scores"}), SHAPE),
        mend="could not keep the mask of a (it adds to the scores); state problem.causal",
    )
    refused(lambda: noted(tmp_path / "d.safetensors", a={"mask": {"causal": True}}), mend="its note on a cannot be read")


def test_layers_that_differ_are_refused_unless_one_is_chosen_or_the_field_stated(tmp_path: Path) -> None:
    source = noted(
        tmp_path / "a.safetensors", a={"scale": 0.5, "mask": CAUSAL}, b={"scale": 0.25, "mask": CAUSAL | {"causal": False}}
    )
    refused(
        lambda: Problem(source, SHAPE), mend="its layers differ in causal (a True, b False); choose one by problem.source.layer"
    )
    refused(lambda: built(source, causal=True), mend="its layers differ in scale (a 0.5, b 0.25)")
    assert built(source, causal=True, scale=1.0).mask == Mask(causal=True)
    one = Problem(Captured(source.path, "b"), SHAPE)
    assert (one.mask, one.scale) == (Mask(), 0.25)


def test_key_lengths_are_those_of_the_batch_entries_of_a_replicate(tmp_path: Path) -> None:
    """Two entries of 2 heads each with 5 and 3 keys: replicates of less than a layer would differ."""
    source = noted(
        tmp_path / "a.safetensors", a={"scale": None, "mask": {"causal": False, "window": None, "key_lengths": [5, 3]}}
    )
    whole = Shape(2, 2, 2, 6, 6, 3)
    assert Problem(source, whole).mask == Mask(key_lengths=(5, 3))
    assert Problem(source, Shape(2, 2, 2, 6, 4, 3)).mask == Mask(key_lengths=(4, 3))
    assert Problem(source, Shape(2, 2, 2, 6, 3, 3)).mask == Mask()
    assert Problem(source, Shape(4, 1, 1, 6, 6, 3)).mask == Mask(key_lengths=(5, 5, 3, 3))
    for shape in (SHAPE, Shape(1, 4, 4, 6, 6, 3), Shape(1, 2, 2, 6, 6, 3)):
        mend = "give problem.batch=2 and all heads of a layer"
        refused(lambda shape=shape: Problem(source, shape), mend=mend)  # type: ignore[misc]
    assert built(source, key_lengths=[6]).mask == Mask(key_lengths=(6,))


def test_first_tokens_stay_where_the_mask_had_them(tmp_path: Path) -> None:
    """Query 0 of the file sees key 0; among 3 queries and 6 keys it would see four."""
    source = noted(tmp_path / "a.safetensors", a={"scale": None, "mask": CAUSAL})
    assert Problem(source, Shape(queries=3, keys=3, head_dim=3)).mask == Mask(causal=True)
    fewer = Shape(queries=3, keys=6, head_dim=3)
    refused(lambda: Problem(source, fewer), field="problem.keys", mend="give 0 more keys than queries")
    assert built(source, fewer, causal=True).mask == Mask(causal=True)
