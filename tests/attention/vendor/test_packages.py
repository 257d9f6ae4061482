"""FlashAttention and SageAttention from their packages, on stand-ins with the signatures of those packages, and as installed.

A stand-in is a distribution in a folder of its own, found and imported as the real one is. It computes in FP64, in the layout and
by the conventions of the package: tokens before heads, windows as keys to the left and to the right, LSE of rows that see no key.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from numdev import BadInput, Bench, Exact, Mask, Order, Precision, SageAttention, Tiled, Tiling, Unsupported
from numdev.arithmetic.formats import BF16, FP16, Format
from numdev.attention.emulation import emulation_of, gradients_emulation_of
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.attention.vendor import dispatch
from numdev.attention.vendor.dispatch import Packaged
from numdev.attention.vendor.flash_attn import FlashAttn, FlashAttnBackward, FlashVersion
from numdev.results.record import Status, describe
from tests.attention.bounds import near_golden, output_near_golden
from tests.cases import Inputs, Sizes, draw_all, on

FA2, FA3, FA4 = FlashVersion
SIZES: Sizes = (2, 4, 2, 37, 53, 64)
MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window=9),
    "causal window": Mask(causal=True, window=5),
}
HIDING: Sizes = (1, 2, 2, 40, 24, 64)  # under a causal limit the first 16 queries see no key

# Of flash_attn/flash_attn_interface.py 2.8.3, hopper/flash_attn_interface.py 3.0.0, flash_attn/cute/interface.py 4.0.0b36, and
# sageattention/core.py 1.0.6 and 2.2.0.
SIGNATURES = {
    "flash-attn": "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False",
    "flash-attn-3": "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False",
    "flash-attn-4": "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
    "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, "
    "mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, "
    "return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None",
    "sageattention": 'q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs',
    "sageattention 2": 'q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs',
}
MATHS = '''
import math, torch

calls = []

def attend(q, k, v, scale, causal, left, right, empty):
    """Tokens before heads; in FP64, from the definition, head by head."""
    n, m, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    place = torch.arange(n)[:, None] + m - n
    key = torch.arange(m)[None, :]
    seen = torch.ones(n, m, dtype=torch.bool)
    if causal:
        seen &= key <= place
    if left is not None and left >= 0:
        seen &= key >= place - left
    if right is not None and right >= 0:
        seen &= key <= place + right
    outs, lses = [], []
    for head in range(q.shape[2]):
        s = scale * q[:, :, head].double() @ k[:, :, head // group].double().mT
        s = s.masked_fill(~seen, -math.inf)
        top = s.amax(-1, keepdim=True).clamp(min=-1e300)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        outs.append(torch.where(total > 0, p @ v[:, :, head // group].double() / total.clamp(min=1e-300), 0.0))
        lses.append(torch.where(total > 0, total.log() + top, empty).squeeze(-1))
    return torch.stack(outs, 2).to(q.dtype), torch.stack(lses, 1).float()
'''
FLASH = """
def flash_attn_func({signature}):
    calls.append(dict(shape=tuple(q.shape), causal=causal, window_size=window_size, deterministic=deterministic))
    assert q.shape[-1] <= 256, "head_dim is at most 256"
    assert q.dtype == k.dtype == v.dtype
    out, lse = attend(q, k, v, softmax_scale, causal, *window_size, {empty})
    return {returned}
"""
SAGE = """
def sageattn({signature}):
    calls.append(dict(shape=tuple(q.shape), causal=is_causal))
    assert q.shape[-1] in (64, 96, 128), "headdim should be in [64, 96, 128]."
    km = k.mean(dim=2, keepdim=True)
    {smooth}
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = attend(*swapped, sm_scale, is_causal, -1, -1, -math.inf)
    return {returned}
"""
PACKAGES: dict[str, tuple[str, str]] = {
    "flash-attn": ("flash_attn/flash_attn_interface.py", "out if not return_attn_probs else (out, lse, None)"),
    "flash-attn-3": ("flash_attn_interface.py", "(out, lse) if return_attn_probs else out"),
    "fa3-fwd": ("fa3_fwd_interface.py", "(out, lse) if return_attn_probs else out"),
    "flash-attn-4": ("flash_attn/cute/interface.py", "(out, lse if return_lse else None)"),
}
VERSION = {FA2: "flash-attn", FA3: "flash-attn-3", FA4: "flash-attn-4"}
KERNELS = {
    "flash-attn": ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>",),
    "flash-attn-3": (
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>>",
    ),
    "flash-attn-4": (
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor" + "0" * 900,
    ),
    "sageattention": ("quant_per_block_int8_kernel", "_attn_fwd"),
}
BACKWARD = {
    FA2: (
        "flash::flash_bwd_dot_do_o_kernel",
        "flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
        "flash::flash_bwd_convert_dq",
    ),
    FA3: (
        "flash::FlashAttnBwdPreprocess",
        "cutlass::device_kernel<flash::FlashAttnBwdSm90<1>>",
        "flash::FlashAttnBwdPostprocess",
    ),
    FA4: ("FlashAttentionBackwardPreprocess", "flash_bwd_sm90FlashAttentionBackwardSm90_0", "FlashAttentionBackwardPostprocess"),
}


def install(folder: Path, name: str, version: str, sources: str, module: str) -> None:
    """A distribution as an installer leaves it."""
    (folder / module).parent.mkdir(parents=True, exist_ok=True)
    (folder / module).write_text(dedent(sources))
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of packages in front of all others; the stand-ins in it run on a CPU, unseen by the profiler."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Packaged, "devices", ("cpu", "cuda"))
    monkeypatch.setattr(dispatch, "_RAN", {})
    names = {"flash_attn", "flash_attn_interface", "fa3_fwd_interface", "sageattention"}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    dispatch._version.cache_clear()
    yield tmp_path
    dispatch._version.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


def kernels(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(dispatch, "kernels_of", lambda run, device: (run(), names))


def flash(site: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str = "9.1") -> None:
    """A stand-in of FlashAttention."""
    module, returned = PACKAGES[name]
    like = "flash-attn-3" if name == "fa3-fwd" else name
    empty = "math.inf" if name == "flash-attn" else "-math.inf"
    sources = MATHS + FLASH.format(signature=SIGNATURES[like], empty=empty, returned=returned)
    install(site, name, version, sources, module)
    kernels(monkeypatch, *KERNELS[like])


def sage(site: Path, monkeypatch: pytest.MonkeyPatch, version: str = "1.0.6") -> None:
    first = version.startswith("1")
    returned = "out.transpose(1, 2)" if first else "(out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)"
    signature = SIGNATURES["sageattention" if first else "sageattention 2"]
    smooth = "k -= km" if first else "k = k - km; raw = k + km"
    sources = MATHS + SAGE.format(signature=signature, smooth=smooth, returned=returned)
    install(site, "sageattention", version, sources, "sageattention.py")
    kernels(monkeypatch, *KERNELS["sageattention"])


def calls(module: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = sys.modules[module].calls
    return made


def near(variant: Packaged, inputs: Inputs, mask: Mask, scale: float | None = None) -> None:
    """Out and LSE beside golden, within what rounding the output once, or a kernel of the policy, may add."""
    output = variant(*inputs[:3], mask, scale)
    output_near_golden(output, inputs, mask, Precision.kernel(variant.fmt), scale=scale)


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("version", FlashVersion)
def test_flash_attention_is_attention(
    site: Path, monkeypatch: pytest.MonkeyPatch, version: FlashVersion, mask: str, fmt: Format
) -> None:
    """Heads that share keys, more keys than queries, and fewer, so that rows see no key; with a scale of one's own."""
    flash(site, monkeypatch, VERSION[version])
    variant, seen = FlashAttn(version, fmt), MASKS[mask]
    for sizes, scale in ((SIZES, None), (HIDING, 0.3)):
        q, k, v, do = draw_all(sizes)
        rounded = (*variant.round_inputs(q, k, v), do)
        near(variant, rounded, seen, scale)
    made = calls(variant.places[VERSION[version]])
    assert {call["shape"] for call in made} == {(2, 37, 4, 64), (1, 40, 2, 64)}
    # Without a window the package has its own default, which is another in version 4.
    default, side = (None, None) if version is FA4 else (-1, -1), (seen.window or 1) - 1
    window = default if seen.window is None else (side, 0 if seen.causal else side)
    assert {(call["causal"], call["window_size"]) for call in made} == {(seen.causal, window)}


@pytest.mark.parametrize("version", FlashVersion)
def test_the_kernel_names_package_version_and_kernel(site: Path, monkeypatch: pytest.MonkeyPatch, version: FlashVersion) -> None:
    """The package and its version are part of the configuration, and so of the key."""
    absent = describe(FlashAttn(version))
    flash(site, monkeypatch, VERSION[version])
    dispatch._version.cache_clear()
    variant = FlashAttn(version)
    output = variant(*variant.round_inputs(*draw_all(SIZES)[:3]), Mask())
    assert output.kernel == f"{VERSION[version]} 9.1 {KERNELS[VERSION[version]][0][:200]}"
    assert (absent["digest"], describe(variant)["digest"]) == ("", f"{VERSION[version]} 9.1")
    assert describe(variant)["version"] == version.value


def test_another_build_of_version_3_serves_where_the_first_is_absent(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flash(site, monkeypatch, "fa3-fwd", "0.0.3")
    variant = FlashAttn(FA3)
    assert variant(*variant.round_inputs(*draw_all(SIZES)[:3]), Mask()).kernel.startswith("fa3-fwd 0.0.3 ")
    flash(site, monkeypatch, "flash-attn-3", "3.0.0")
    dispatch._version.cache_clear()
    assert variant.digest == "flash-attn-3 3.0.0"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("version", FlashVersion)
def test_gradients_are_those_of_the_package(
    site: Path, monkeypatch: pytest.MonkeyPatch, version: FlashVersion, deterministic: bool
) -> None:
    """By autograd through its function, which takes along whether it is to be deterministic; O and LSE are those it returned."""
    flash(site, monkeypatch, VERSION[version])
    names = [KERNELS[VERSION[version]], BACKWARD[version]]
    monkeypatch.setattr(dispatch, "kernels_of", lambda run, device: (run(), names.pop(0)))
    variant, mask = FlashAttnBackward(version, deterministic), Mask(causal=True)
    inputs = variant.round_inputs(*draw_all(SIZES))
    got = variant(*inputs, mask)
    near_golden(got, inputs, mask, 8 * BF16.u + 2.0**-13)
    assert got.kernel == f"{VERSION[version]} 9.1 {BACKWARD[version][1]}"
    assert [call["deterministic"] for call in calls(variant.forward.places[VERSION[version]])] == [deterministic]
    saved = variant.forward_pass.saved(variant.forward_pass(*inputs[:3], mask))
    assert torch.equal(saved.out, variant.forward(*inputs[:3], mask).out)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    variant.attend(q, k, v, mask).backward(inputs[3])
    assert torch.equal(q.grad, got.dq) if q.grad is not None else False


@pytest.mark.parametrize("variant", [*map(FlashAttn, FlashVersion), SageAttention()], ids=str)
def test_what_is_not_installed_is_refused_with_the_command_that_installs_it(site: Path, variant: Packaged) -> None:
    """The backward pass names its own setting."""
    if variant.digest:
        pytest.skip(f"{variant.digest} is installed")
    inputs, first = draw_all(SIZES), next(iter(variant.places))
    with pytest.raises(Unsupported, match=rf"^{variant.field}: .*{first}.* is not installed; pip install numdev\[{first}\]$"):
        variant(*variant.round_inputs(*inputs[:3]), Mask())
    record = Bench(Exact(), "cpu").measure(Problem(Distribution(Kind.NORMAL), Shape(queries=8, keys=8)), variant, seeds=1)
    assert (record.status, record.reason.count("not installed")) == (Status.UNSUPPORTED, 1)
    if isinstance(variant, FlashAttn):
        backward = FlashAttnBackward(variant.version)
        with pytest.raises(Unsupported, match=rf"^backward\.version: {first}.* is not installed"):
            backward(*backward.round_inputs(*inputs), Mask())


def test_what_the_package_does_not_take_is_refused_by_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flash(site, monkeypatch, "flash-attn-4")
    variant, wide = FlashAttn(FA4), draw_all((1, 1, 1, 4, 4, 264))
    q, k, v = variant.round_inputs(*draw_all(SIZES)[:3])
    with pytest.raises(Unsupported, match=r"^problem\.key_lengths: flash_attn_func takes none"):
        variant(q, k, v, Mask(key_lengths=(40, 53)))
    with pytest.raises(Unsupported, match=r"^attention\.version: fa4: head_dim is at most 256$"):
        variant(*variant.round_inputs(*wide[:3]), Mask())
    with pytest.raises(BadInput, match=r"^problem\.kv_heads: 3 "):
        variant(q, k[:, :1].expand(-1, 3, -1, -1), v[:, :1].expand(-1, 3, -1, -1), Mask())
    monkeypatch.setattr(Packaged, "devices", ("cuda",))
    with pytest.raises(Unsupported, match=r"^attention\.version: flash-attn-4 9.1 runs on CUDA devices; use device=cuda$"):
        variant(q, k, v, Mask())


@pytest.mark.parametrize("version", FlashVersion)
def test_another_kernel_than_its_own_is_no_answer(site: Path, monkeypatch: pytest.MonkeyPatch, version: FlashVersion) -> None:
    flash(site, monkeypatch, VERSION[version])
    kernels(monkeypatch, "some_gemm", "softmax_warp_forward")
    variant = FlashAttn(version)
    q, k, v = variant.round_inputs(*draw_all(SIZES)[:3])
    with pytest.raises(Unsupported, match=rf"^attention\.version: asked for {variant.family}, but math ran \(some_gemm\)"):
        variant(q, k, v, Mask())


def test_a_build_for_another_torch_says_so(site: Path) -> None:
    install(site, "flash-attn", "2.8.3", "raise ImportError('undefined symbol: _ZN3c10')", "flash_attn/flash_attn_interface.py")
    variant = FlashAttn(FA2)
    q, k, v = variant.round_inputs(*draw_all(SIZES)[:3])
    with pytest.raises(Unsupported, match=r"^attention\.version: flash-attn 2\.8\.3 does not work with torch .*undefined symbol"):
        variant(q, k, v, Mask())


@pytest.mark.parametrize("version", ["1.0.6", "2.2.0"])
def test_sageattention_is_attention_and_leaves_k_as_it_is(site: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Version 1 writes to k, and has no LSE."""
    sage(site, monkeypatch, version)
    variant = SageAttention(FP16)
    inputs = (*variant.round_inputs(*draw_all((2, 4, 2, 48, 48, 64))[:3]), torch.empty(0))
    before = inputs[1].clone()
    for mask in (Mask(), Mask(causal=True)):
        output = variant(*inputs[:3], mask)
        golden = Exact()(*inputs[:3], mask)
        assert float((output.out.double() - golden.out).abs().max()) <= 2.0**-9  # its stand-in rounds k again, less its mean
        assert torch.equal(inputs[1], before)
        assert (output.lse is None) == (version[0] == "1")
        assert output.kernel == f"sageattention {version} _attn_fwd"


def test_what_sageattention_does_not_take_is_refused_by_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sage(site, monkeypatch)
    variant = SageAttention()
    q, k, v = variant.round_inputs(*draw_all(SIZES)[:3])
    for mask, name in ((Mask(window=3), "window"), (Mask(key_lengths=(3, 4)), "key_lengths"), (Mask(causal=True), "causal")):
        with pytest.raises(Unsupported, match=rf"^problem\.{name}: SageAttention"):
            variant(q, k, v, mask)
    with pytest.raises(Unsupported, match=r"^attention: sageattention: headdim should be in"):
        variant(q[..., :32].contiguous(), k[..., :32].contiguous(), v[..., :32].contiguous(), Mask())


def of(head_dim: int) -> Shape:
    """A shape that fills any GPU."""
    return Shape(heads=64, kv_heads=64, queries=2048, keys=2048, head_dim=head_dim)


@pytest.mark.parametrize(
    ("version", "dim", "mask", "bc"),
    [
        *((FA2, 64, mask, 128) for mask in (Mask(), Mask(causal=True))),
        (FA2, 128, Mask(), 64),
        *((FA3, dim, mask, bc) for dim, free in ((64, 192), (128, 176)) for mask, bc in ((Mask(), free), (Mask(window=9), 128))),
        *((FA4, dim, mask, 128) for dim in (64, 128) for mask in (Mask(), Mask(causal=True))),
        (FA4, 96, Mask(), 144),
    ],
)
def test_tiles_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch, version: FlashVersion, dim: int, mask: Mask, bc: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert emulation_of(FlashAttn(version), of(dim), mask).tiling == Tiling(bc=bc, order=Order.REVERSE)
    with pytest.raises(BadInput, match=r"^tiling\.bc: .*head_dim 64"):
        emulation_of(FlashAttn(version), of(256), mask)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=9)], ids=str)
@pytest.mark.parametrize("version", [FA3, FA4])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, version: FlashVersion, dim: int, mask: Mask, deterministic: bool
) -> None:
    """Of version 3 a window alone does not turn the order round."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    variant, forward = FlashAttnBackward(version, deterministic), Tiled(Precision.kernel(BF16))
    emulation = gradients_emulation_of(variant, of(dim), mask, forward=forward)
    br = 128 if dim == 64 else 80 if mask.is_none else 64
    reversed_ = mask.causal or (mask.window is not None and version is FA4)
    order = Order.RANDOM if not deterministic else Order.REVERSE if reversed_ else Order.FORWARD
    assert (emulation.tiling, emulation.query_order) == (Tiling(br, 128, order), Order.FORWARD)
    with pytest.raises(BadInput, match=r"^problem\.kv_heads: "):
        variant.arithmetic(Shape(heads=4, kv_heads=2), mask)


def test_version_2_adds_to_dq_in_an_order_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Tiled(Precision.kernel(BF16))
    emulation = gradients_emulation_of(FlashAttnBackward(FA2), of(64), Mask(), forward=forward)
    assert (emulation.tiling, emulation.query_order) == (Tiling(128, 128, Order.RANDOM), Order.REVERSE)
    with pytest.raises(BadInput, match=r"^tiling\.order: .*deterministic"):
        gradients_emulation_of(FlashAttnBackward(FA2, deterministic=True), of(64), Mask(), forward=forward)


def test_on_another_gpu_than_a_hopper_the_tiles_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(BadInput, match=r"^tiling\.bc: .*Hopper GPUs alone"):
        emulation_of(FlashAttn(FA4), of(64))


@pytest.mark.parametrize("version", ["1.0.6", "2.2.0"])
def test_version_1_of_sageattention_is_emulated_by_its_policy(site: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    sage(site, monkeypatch, version)
    if version[0] == "2":
        with pytest.raises(BadInput, match=r"^tiling\.bc: .*version 2 has other kernels for each GPU"):
            emulation_of(SageAttention(), of(64))
        return
    emulation = emulation_of(SageAttention(), of(64))
    assert emulation.precision == Precision.parse("sage1").with_step(output=BF16)
    assert (emulation.tiling, emulation.format) == (Tiling(bc=64), BF16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestAsInstalled:
    SIZES: Sizes = (2, 4, 4, 500, 516, 64)
    VERSIONS = tuple(version for version in FlashVersion if FlashAttn(version).digest)

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("version", FlashVersion)
    def test_forward(self, version: FlashVersion, mask: str) -> None:
        variant = FlashAttn(version)
        if not variant.digest:
            pytest.skip("not installed")
        if variant.digest.startswith("fa3-fwd") and MASKS[mask].window is not None:
            pytest.skip("built without windows")
        for sizes in (self.SIZES, (2, 4, 2, 300, 200, 128)):
            rounded = variant.round_inputs(*draw_all(sizes)[:3])
            near(variant, on("cuda", (*rounded, rounded[0])), MASKS[mask])

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("version", FlashVersion)
    def test_backward(self, version: FlashVersion, mask: str, deterministic: bool) -> None:
        variant = FlashAttnBackward(version, deterministic)
        if not variant.forward.digest or variant.forward.digest.startswith("fa3-fwd"):
            pytest.skip("not installed")
        inputs = on("cuda", variant.round_inputs(*draw_all(self.SIZES)))
        got = variant(*inputs, MASKS[mask])
        near_golden(got, inputs, MASKS[mask], 8 * BF16.u + 2.0**-13)
        if deterministic:
            assert all(torch.equal(x, got.tensors()[name]) for name, x in variant(*inputs, MASKS[mask]).tensors().items())

    @pytest.mark.parametrize("causal", [False, True])
    def test_sageattention(self, causal: bool) -> None:
        """Off by what INT8 scores allow: some hundredths of the values."""
        variant = SageAttention()
        if not variant.digest:
            pytest.skip("not installed")
        q, k, v = on("cuda", variant.round_inputs(*draw_all((2, 4, 4, 512, 512, 64))[:3]))
        before, mask = k.clone(), Mask(causal=causal)
        output = variant(q, k, v, mask)
        error = (output.out.double() - Exact()(q, k, v, mask).out).abs()
        assert float(error.pow(2).mean().sqrt()) < 0.02
        assert torch.equal(k, before)
