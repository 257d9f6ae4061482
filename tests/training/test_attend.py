"""Attention exchanged under unmodified models: every call, forward and backward, what cannot be honoured; masks that are read.

Models of other libraries have random weights; their tests are skipped where a library is not installed.
"""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as kept_by_name
from torch.utils.checkpoint import checkpoint

import numdev as nd
from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.exact import ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.triton import TritonBackward
from numdev.attention.vendor.sdpa import SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import BadInput, Unsupported
from numdev.training.attend import MaskReader, Variant
from tests.training.toy import KERNEL, TILED

EXACT, EAGER = ExactBackward(), NaiveBackward.eager(BF16)
TINY = {"embed_dim": 16, "num_heads": 4, "batch_first": True}


class Projected(nn.Module):
    """Attention of learned projections, by any function that is called as torch's."""

    def __init__(self, attention: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.attention = attention

    def forward(self, x: Tensor, **named: Any) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:-1], 4, 12).transpose(-3, -2).chunk(3, -1)
        attention = self.attention or functional.scaled_dot_product_attention
        return attention(q, k, v, **named).transpose(-3, -2).flatten(-2)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Whatever a test does, torch's own function and its fused path are as they were."""
    yield
    assert functional.scaled_dot_product_attention is kept_by_name
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


def gradients(
    model: nn.Module, *inputs: Tensor, run: Callable[..., Any] | None = None, **named: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a model makes of inputs, or `run` of it and them, and the gradients of its weights."""
    model.zero_grad()
    found = run(model, *inputs) if run else model(*inputs, **named)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(model: nn.Module, *inputs: Tensor, calls: int = 1, run: Callable[..., Any] | None = None, **named: Any) -> Tensor:
    """With exact attention a model in FP64 gives what it gives, to the rounding of sums of some 100 products of numbers near 1.

    With another it does not: each call is exchanged.
    """
    model.double()
    doubled = tuple(each.double() if each.is_floating_point() else each for each in inputs)
    expected, slopes = gradients(model, *doubled, run=run, **named)
    with nd.attend(EXACT) as seen:
        got, found = gradients(model, *doubled, run=run, **named)
    assert (seen.calls, seen.missed) == (calls, 0)
    seen.require()
    assert torch.allclose(got, expected, rtol=1e-11, atol=1e-13)
    for name, slope in slopes.items():
        assert torch.allclose(found[name], slope, rtol=1e-11, atol=1e-11), name
    with nd.attend(EAGER):
        assert not torch.allclose(gradients(model, *doubled, run=run, **named)[0], expected, rtol=1e-5, atol=0.0)
    return expected


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("masked", ["", "padding", "causal"])
def test_modules_of_torch(x: Tensor, train: bool, masked: str) -> None:
    padding = torch.arange(6) >= torch.tensor([[6], [3]]) if masked == "padding" else None
    causal = torch.ones(6, 6).triu(1).bool() if masked == "causal" else None
    attention = nn.MultiheadAttention(**TINY).train(train)
    close(attention, x, x, x, need_weights=False, key_padding_mask=padding, attn_mask=causal)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
    close(model.train(train), x, calls=2, src_key_padding_mask=padding, mask=causal)


def test_calls_by_other_names(x: Tensor) -> None:
    """A name bound before is exchanged too; an operator below the function, and weights that are asked for, are counted."""
    for attention in (None, kept_by_name):
        close(Projected(attention), x, is_causal=True)

    def elsewhere() -> None:
        Projected(torch.ops.aten.scaled_dot_product_attention)(x)
        nn.MultiheadAttention(**TINY)(x, x, x)

    with pytest.warns(UserWarning, match="no call of scaled_dot_product_attention"), nd.attend(EXACT) as seen:
        elsewhere()
    assert seen.elsewhere == {"aten.scaled_dot_product_attention": 1, "nn.MultiheadAttention with need_weights=True": 1}
    with pytest.raises(Unsupported, match="^model: it called"):
        seen.require()


class Block(nn.Module):
    """A block of a vision transformer, whose attention is torch's function or matrix products with a softmax."""

    def __init__(self, softmax: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.attn = Projected(None if softmax is None else lambda q, k, v: softmax(q @ k.mT / 2) @ v)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class Vision(nn.Module):
    """Four blocks, of which three multiply matrices themselves, and a head whose softmax is over classes."""

    def __init__(self, softmax: Callable[[Tensor], Tensor], *, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(softmax), Block(softmax), Block(softmax)])
        self.head, self.again = nn.Linear(16, 3), again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        classes: Tensor = self.head(x).softmax(-1)
        return classes


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda x: x.softmax(-1),
    "function": lambda x: torch.softmax(x, dim=3, dtype=torch.float64).float(),
    "module": nn.Softmax(dim=-1),
    "operator": lambda x: torch.ops.aten._softmax.default(x, -1, False),
    "heads as batch": lambda x: x.flatten(0, 1).softmax(-1).view_as(x),
    "one query": lambda x: torch.cat([torch.special.softmax(row, -1) for row in x.split(1, dim=2)], dim=2),
}
MISSED = r"attention ran elsewhere, and was not exchanged: (\d of matrix products in blocks\.[123]\.attn(, )?){3}"


@pytest.mark.parametrize("softmax", SOFTMAXES.values(), ids=list(SOFTMAXES))
def test_attention_of_matrix_products_is_named_and_refused(x: Tensor, softmax: Callable[[Tensor], Tensor]) -> None:
    model = Vision(softmax)
    with pytest.warns(UserWarning, match="^attend: " + MISSED), nd.attend(EXACT) as seen:
        model(x)
    assert seen.calls == 1
    assert seen.missed in (3, 3 * x.shape[1])  # once for each query, in one of the spellings
    with pytest.raises(Unsupported, match=MISSED):
        seen.require()


def test_shadow_capture_and_layers_that_compute_again_name_it_too(x: Tensor, tmp_path: Path) -> None:
    model = Vision(SOFTMAXES["method"])
    with pytest.warns(UserWarning, match="^shadow: " + MISSED), nd.shadow({"exact": EXACT}, EXACT) as log:
        model(x)
    assert (log.seen.calls, log.seen.missed) == (1, 3)
    with (
        pytest.warns(UserWarning, match="^attend: " + MISSED),
        nd.attend(EXACT) as outer,
        pytest.warns(UserWarning, match="^capture: " + MISSED),
        nd.capture(model, tmp_path) as captured,
    ):
        model(x)
    assert outer.missed == captured.seen.missed == 3
    with pytest.warns(UserWarning, match="was not exchanged"), nd.attend(EXACT) as seen:
        Vision(SOFTMAXES["method"], again=True)(x.requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]
    assert (seen.calls, seen.missed) == (2, 3)


def test_another_softmax_is_no_attention() -> None:
    """Of classes, classes of tokens, channels, and over one key."""
    others = [((4, 4), -1), ((2, 5, 7), -1), ((2, 3, 5, 5), 1), ((2, 3, 5, 1), -1)]
    with pytest.warns(UserWarning, match="no call of"), nd.attend(EXACT) as seen:
        _ = [torch.randn(shape).softmax(dim) for shape, dim in others], functional.log_softmax(torch.randn(2, 3, 5, 5), -1)
    assert not seen.elsewhere


@pytest.mark.parametrize("variant", [TILED, VanillaBackward(BF16), SdpaBackward(nd.Backend.FLASH)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_implementation_computes_both_passes(x: Tensor, variant: Variant, dtype: torch.dtype) -> None:
    """Half of BF16's ulp is 2^-9 of a number, and a dozen such roundings lie between q and a weight's gradient.

    SdpaBackward(FLASH) calls torch's function itself, which must not be exchanged for itself.
    """
    model = Projected().to(dtype)
    expected, slopes = gradients(model, x.to(dtype), is_causal=True)
    with nd.attend(variant) as seen:
        got, found = gradients(model, x.to(dtype), is_causal=True)
    assert seen.calls == 1
    assert got.dtype == dtype
    assert torch.allclose(got, expected, rtol=12 * 2**-9, atol=12 * 2**-9)
    slope = slopes["project.weight"]
    assert float((found["project.weight"] - slope).norm() / slope.norm()) < 12 * 2**-9
    if dtype is not torch.bfloat16:
        assert not torch.equal(got, expected), "it is torch's own"


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize(("causal", "keys"), [(False, 9), (True, 5), (True, 9)])
def test_arguments_of_the_function(leading: tuple[int, ...], causal: bool, keys: int) -> None:
    """Any number of dimensions, another scale, another dimension of v; torch's causal limit is aligned top left."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((5, 4), (keys, 4), (keys, 3))
    q, k, v = (torch.randn(*leading, *size, generator=generator, dtype=torch.float64) for size in sizes)
    expected = kept_by_name(q, k, v, is_causal=causal, scale=0.7)
    with nd.attend(nd.Exact()):
        got = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.7)
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, rtol=0, atol=1e-14)


def test_heads_share_kv_heads_and_nothing_else_is_repeated() -> None:
    """Three heads of k without a batch are no batch of three."""
    q, kv = torch.randn(2, 6, 5, 4).double(), torch.randn(2, 2, 5, 4).double()
    exact = kept_by_name(q, kv, kv, enable_gqa=True)
    with nd.attend(EXACT):
        assert torch.allclose(functional.scaled_dot_product_attention(q, kv, kv, enable_gqa=True), exact, rtol=0, atol=1e-14)
    q, k = torch.randn(3, 3, 5, 4), torch.randn(3, 6, 4)
    calls = [((q, k, k), "key"), ((q, q, k), "value"), ((k, q, q), "key"), ((q, q[:1], q[:1]), "k")]
    for inputs, name in [*calls, ((q, q[:, :2], q[:, :2]), "enable_gqa")]:
        with pytest.raises(BadInput, match=f"^{name}: "), nd.attend(EXACT):
            functional.scaled_dot_product_attention(*inputs)


def test_autocast_casts_the_inputs_of_attention(x: Tensor) -> None:
    """O has autocast's dtype; FP64 is left alone; and the steps of the implementation are not cast."""
    dtype, model, given = torch.bfloat16, Projected(), torch.randn(1, 2, 5, 4)
    fp32 = NaiveBackward.eager(FP32)
    with torch.autocast("cpu", dtype):
        expected = model(x)
        with nd.attend(EXACT):
            got = model(x)
            assert functional.scaled_dot_product_attention(given.double(), given.double(), given.double()).dtype == torch.float64
        with nd.attend(fp32):
            rounded = functional.scaled_dot_product_attention(given, given, given)
            got.square().sum().backward()
    assert got.dtype == expected.dtype == dtype
    assert torch.allclose(got, expected, rtol=0.02, atol=0.02)
    cast = given.to(dtype)
    assert torch.equal(
        rounded, nd.Naive(nd.Precision.eager(FP32))(cast.float(), cast.float(), cast.float(), nd.Mask()).out.to(dtype)
    )


def test_requests_that_no_implementation_meets_are_refused(x: Tensor) -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(Unsupported, match="^is_causal: torch aligns it top left"), nd.attend(EXACT):
        functional.scaled_dot_product_attention(q, q[..., :3, :], q[..., :3, :], is_causal=True)
    with pytest.raises(Unsupported, match="^dropout_p"), nd.attend(EXACT):
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)(x)
    with pytest.raises(Unsupported, match=r"^variant: Tiled has no backward pass; .*torch.no_grad"), nd.attend(KERNEL):
        Projected()(x)
    with torch.no_grad(), nd.attend(KERNEL) as seen:
        Projected()(x)
    assert seen.calls == 1


def test_contexts_nest_and_end_with_an_exception(x: Tensor) -> None:
    model = Projected()
    with nd.attend(EXACT) as outer:
        expected = model(x)
        with nd.attend(TILED) as inner:
            assert not torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        with pytest.raises(RuntimeError, match="invalid for input"), nd.attend(TILED) as lost:
            model(x).view(7)
        assert torch.equal(model(x), expected)
    assert (outer.calls, inner.calls, lost.calls) == (3, 1, 1)
    assert (outer.missed, inner.missed) == (0, 0)


def test_two_threads_each_have_their_own(x: Tensor) -> None:
    model, barrier = Projected(), threading.Barrier(2)

    def work(variant: Variant) -> Tensor:
        with nd.attend(variant):
            barrier.wait()
            out: Tensor = model(x).detach()
            barrier.wait()
        return out

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, (EXACT, TILED)))
    for variant, out in zip((EXACT, TILED), results, strict=True):
        with nd.attend(variant):
            assert torch.equal(out, model(x))


def test_who_replaced_the_function_before_keeps_it(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's replacement is put back, and answers threads that do not take part."""

    def theirs(*args: object, **named: Any) -> Tensor:
        raise RuntimeError("theirs")

    monkeypatch.setattr(functional, "scaled_dot_product_attention", theirs)
    with nd.attend(EXACT) as seen:
        Projected()(x)
    assert seen.calls == 1
    assert functional.scaled_dot_product_attention is theirs
    monkeypatch.undo()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_the_variants_after_the_context_and_of_checkpointed_layers(x: Tensor, reentrant: bool) -> None:
    model, leaf = Projected().double(), x.double().requires_grad_()
    with nd.attend(TILED) as seen:
        _, slopes = gradients(model, leaf)
        model.zero_grad()
        checkpoint(model, leaf, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(model.project.weight.grad, slopes["project.weight"])  # type: ignore[arg-type]
        model.zero_grad()
        out = model(leaf)
    out.square().sum().backward()
    assert seen.calls == 4
    assert torch.equal(model.project.weight.grad, slopes["project.weight"])  # type: ignore[arg-type]


class AgainElsewhere(torch.autograd.Function):
    """Calls attention again in its backward pass, on a thread that Python has not started: as torch's own for a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.scaled_dot_product_attention(x, x, x)

    @staticmethod
    def backward(ctx: Any, *slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: list[object] = []
        done = threading.Event()

        def again() -> None:
            try:
                with torch.enable_grad():
                    leaf = x.detach().requires_grad_()
                    found.append(torch.autograd.grad(functional.scaled_dot_product_attention(leaf, leaf, leaf), leaf, slope)[0])
            except Exception as error:
                found.append(error)
            done.set()

        _thread.start_new_thread(again, ())
        assert done.wait(30)
        assert isinstance(found[0], Tensor), found
        return found[0]


@pytest.mark.parametrize("call", ["Tensor.backward", "autograd.grad"])
def test_torchs_own_threads_answer_as_their_caller_does(x: Tensor, call: str) -> None:
    given = x.double()[:, None].requires_grad_()
    with nd.attend(TILED) as seen:
        expected = torch.autograd.grad(functional.scaled_dot_product_attention(given, given, given).square().sum(), given)[0]
        out = AgainElsewhere.apply(given).square().sum()  # type: ignore[no-untyped-call]
        if call == "autograd.grad":
            given.grad = torch.autograd.grad(out, given)[0]
        else:
            out.backward()
    assert seen.calls == 3
    assert given.grad is not None
    assert torch.equal(given.grad, expected)


_COMPILED = """
import torch
from torch import nn
import numdev as nd
from numdev.attention.vendor.vanilla import VanillaBackward

variant, x = VanillaBackward(nd.Format.parse("bf16")), torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(0))

def model(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x).relu()

plain, compiled = model(x), torch.compile(model, backend="eager")
assert torch.equal(compiled(x), plain)
with nd.attend(variant) as seen:
    got, expected = compiled(x), model(x)
assert seen.calls == 2, seen
assert torch.equal(got, expected) and not torch.equal(got, plain)
assert torch.equal(compiled(x), plain)
inside = torch.compile(nn.MultiheadAttention(16, 4, batch_first=True), backend="eager")
try:
    with nd.attend(variant):
        inside(*(x[:, 0].repeat(1, 1, 4),) * 3, need_weights=False)
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_compiled_models() -> None:
    """A graph breaks at attention, also one that was compiled before; inside of nn.MultiheadAttention it is refused.

    In a process of its own, in which nothing but the model is compiled: here a type checker surrounds every function.
    """
    done = subprocess.run([sys.executable, "-c", _COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "model: torch.compile must not fuse what numdev computes, and it traces nn.MultiheadAttention" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    """No call waits for the device, a step can be captured, and torch's own threads compute what was asked for."""

    variant = TritonBackward(nd.Triton(BF16), BF16)

    def test_nothing_waits_and_a_step_is_captured(self) -> None:
        layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda(), torch.randn(4, 128, 256, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                out = model(x)
            out.float().square().mean().backward()

        with nd.attend(self.variant) as seen:
            for _ in range(3):  # compiles, and warms up as torch's documentation has it
                model.zero_grad(set_to_none=True)
                step()
            expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            model.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                step()
        graph.replay()
        torch.cuda.synchronize()
        assert seen.calls == 10
        assert seen.missed == 0
        for p, slope in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.grad, slope)  # type: ignore[arg-type]

    def test_a_mask_is_read_only_where_that_is_asked_for(self) -> None:
        q, mask = torch.randn(2, 2, 64, 64, device="cuda").bfloat16(), torch.ones(2, 1, 1, 64, dtype=torch.bool, device="cuda")
        mask[1, ..., 40:] = False
        expected = kept_by_name(q, q, q, attn_mask=mask)
        with pytest.raises(Unsupported, match="^attn_mask: it lies on cuda"), nd.attend(self.variant):
            functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        with nd.attend(self.variant, read_masks=True):
            got = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        assert torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=2**-7)


SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0]])
PADDING = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])


def transformers() -> Any:
    return pytest.importorskip("transformers", minversion="4.56")


def bert() -> Any:
    config = transformers().BertConfig(vocab_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL)
    torch.manual_seed(0)
    return transformers().AutoModel.from_config(config, attn_implementation="sdpa").double()


def llama() -> Any:
    config = transformers().LlamaConfig(vocab_size=32, num_key_value_heads=2, **SMALL)
    torch.manual_seed(0)
    return transformers().AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("padded", [False, True])
def test_transformers(make: Any, padded: bool) -> None:
    """By sdpa, which models take unless told otherwise; with padding and without."""

    def run(model: Any, *, padded: bool = padded) -> Tensor:
        out: Tensor = model(input_ids=TOKENS, **{"attention_mask": PADDING} if padded else {})[0][PADDING.bool()]
        return out

    expected = close(make(), calls=2, run=run)
    if padded and make is bert:  # under a causal limit no token sees the padding behind it
        assert not torch.allclose(run(make(), padded=False), expected, rtol=1e-5, atol=1e-5), "padding changes nothing"


def test_diffusers() -> None:
    """A transformer block of a diffusion model: self-attention over patches, cross-attention to a caption."""
    attention = pytest.importorskip("diffusers.models.attention")
    torch.manual_seed(0)
    block, caption = attention.BasicTransformerBlock(16, 4, 4, cross_attention_dim=8).eval(), torch.randn(2, 5, 8).double()
    close(block, torch.randn(2, 6, 16), calls=2, encoder_hidden_states=caption)


@pytest.mark.parametrize("pooling", ["token", "map"])
def test_timm(pooling: str) -> None:
    """A vision transformer: self-attention in two blocks; `map` adds a call in which one learned query sees all patches."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
    model = timm.VisionTransformer(**sizes, global_pool=pooling, qk_norm=True)
    close(model, torch.randn(2, 3, 16, 16), calls=2 if pooling == "token" else 3)


SHAPE = (2, 3, 5, 7)
MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(key_lengths=(7, 4)),
    Mask(causal=True, key_lengths=(7, 4)),
    Mask(causal=True, window=2),
    Mask(window=2),
    Mask(key_lengths=(5, 0)),
]


def dense(mask: Mask, shape: tuple[int, ...] = SHAPE) -> Tensor:
    queries, keys = shape[-2:]
    seen = mask.visible(queries, keys, (0, queries), (0, keys), torch.device("cpu"))
    return torch.ones(1, 1, queries, keys, dtype=torch.bool) if seen is None else seen


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("expanded", [False, True])
def test_a_tensor_is_read_as_the_mask_that_it_states(mask: Mask, additive: bool, expanded: bool) -> None:
    tensor = dense(mask)
    if expanded:
        tensor = tensor.expand(SHAPE).contiguous()
    if additive:
        tensor = torch.zeros(tensor.shape).masked_fill_(~tensor, float("-inf"))
    read = MaskReader().read(tensor, SHAPE)
    assert torch.equal(dense(read).expand(SHAPE), dense(mask).expand(SHAPE))
    read.check(2, 7)


def test_the_lowest_number_stands_for_minus_infinity() -> None:
    """As in models of transformers: what torch makes of the mask is what it makes of the `Mask` that is read."""
    q, lowest = torch.randn(2, 3, 5, 4), torch.finfo(torch.float32).min
    mask, k = Mask(key_lengths=(7, 3)), torch.randn(2, 3, 7, 4)
    tensor = torch.zeros(2, 1, 1, 7).masked_fill_(torch.arange(7) >= torch.tensor([7, 3])[:, None, None, None], lowest)
    read = MaskReader().read(tensor, SHAPE)
    assert read == mask
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(q, k, k, tensor), attend(q, k, k, dense(read)))
    with pytest.raises(Unsupported, match="^attn_mask: a row sees no key"):
        MaskReader().read(tensor.clone().fill_(lowest), SHAPE)


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 2, 3, 5, 7), (5, 7)])
def test_other_numbers_of_dimensions(shape: tuple[int, ...]) -> None:
    causal = dense(Mask(causal=True))[0, 0]
    assert MaskReader().read(causal.expand(shape), shape) == Mask(causal=True)
    assert MaskReader().read(causal, shape) == Mask(causal=True)
    padded = torch.arange(7) < torch.tensor([[7], [3]])  # of q [batch, tokens, dim]: the scores have one head each
    assert MaskReader().read(padded[:, None, :], (2, 5, 7)) == Mask(key_lengths=(7, 3))


def test_a_mask_is_read_again_when_it_changes() -> None:
    """Also through memory that NumPy shares, whose changes torch does not count."""
    reader, tensor = MaskReader(), dense(Mask(key_lengths=(7, 4))).expand(2, 1, 5, 7).clone()
    for last in (4, 3):
        assert reader.read(tensor, SHAPE) == Mask(key_lengths=(7, last))
        tensor.numpy()[1, ..., last - 1] = False


def test_biases_of_torch() -> None:
    assert MaskReader().read(causal_lower_right(5, 7), SHAPE) == Mask(causal=True)
    assert MaskReader().read(causal_upper_left(5, 5), (2, 3, 5, 5)) == Mask(causal=True)
    with pytest.raises(Unsupported, match="^attn_mask: it is aligned top left"):
        MaskReader().read(causal_upper_left(5, 7), SHAPE)


class OnDevice(Tensor):
    """Says that it lies on another device."""

    device = torch.device("meta")


def test_a_learned_mask_on_a_device_has_a_gradient() -> None:
    tensor = torch.randn(SHAPE, requires_grad=True)
    reader = MaskReader(waits=True, learns=True)
    for _ in range(2):
        bias = reader.read(tensor.as_subclass(OnDevice), SHAPE).bias
        assert bias is not None
        assert bias.source is not None
        assert bias.source.requires_grad
    with pytest.raises(Unsupported, match="the host would have to wait"):
        MaskReader(learns=True).read(tensor.as_subclass(OnDevice), SHAPE)


def test_any_other_tensor_is_read_as_what_it_adds() -> None:
    """Padding before the sequences, packed documents, heads that differ, relative positions with and without hidden keys."""
    random = torch.Generator().manual_seed(0)
    before, heads = (torch.arange(7) >= torch.tensor([[0], [3]]))[:, None, None, :], torch.ones(SHAPE, dtype=torch.bool)
    heads[0, 1, 0, 0] = False
    packed = torch.arange(5)[:, None] // 3 == torch.arange(7) // 3
    biases = [torch.randn(size, generator=random) for size in ((3, 5, 7), SHAPE, (1, 3, 1, 7))]
    for tensor in (before, heads, packed, *biases, biases[0].masked_fill(~packed, float("-inf")), biases[1].bfloat16()):
        mask = MaskReader().read(tensor, SHAPE)
        mask.check(*(SHAPE[axis] for axis in (0, 3, 1, 2)))
        assert mask.bias is not None
        expected = torch.zeros(tensor.shape).masked_fill_(~tensor, float("-inf")) if tensor.dtype is torch.bool else tensor
        assert torch.equal(mask.bias.values.expand(SHAPE), expected.double().expand(SHAPE))


def test_a_tensor_on_another_device_and_one_that_does_not_fit_are_refused() -> None:
    for shape in ((5, 6), (7,)):
        with pytest.raises(BadInput, match=r"^attn_mask: \("):
            MaskReader().read(torch.ones(shape, dtype=torch.bool), SHAPE)
    with pytest.raises(Unsupported, match="^attn_mask: it lies on meta.*read_masks=True"):
        MaskReader().read(torch.ones(5, 7, dtype=torch.bool, device="meta"), SHAPE)
