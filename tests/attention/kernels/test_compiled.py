"""Needs of our kernels as the compiler makes them, read without a GPU: shared memory, and registers that ran out.

A process of its own compiles them and prints, as JSON, what each needs: tests interpret kernels.

    python -m tests.attention.kernels.test_compiled portable|ranged|backward|hopper|hopper_backward

The requests are the most demanding ones. `TRITON_INTERPRET` must not be set.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from numdev import Format, Mask, Tiling, Triton
from numdev.attention.kernels import backward as device
from numdev.attention.kernels import forward, launch, portable
from numdev.attention.precision import BackwardPrecision
from numdev.attention.softmax import Exponential, Recompute

# Bytes of shared memory that a program may have, by compute capability: GeForce RTX 30, GeForce RTX 40 and L40, H100.
SHARED = {86: 101376, 89: 101376, 90: 232448}

# Format, head_dim, queries, compute capability
PORTABLE = (
    ("fp32", 256, 512, 86),
    ("bf16", 256, 512, 90),
    ("bf16", 256, 64, 90),
    ("e4m3fn", 256, 512, 89),
    ("e4m3fn", 128, 16, 90),
)
# Format, head_dim; each in one program for all splits of a fixed size, with and without a causal limit, and in one for each
RANGED = (("bf16", 64), ("bf16", 128))
MASKS = {"none": Mask(), "causal": Mask(causal=True), "all": Mask(True, 1000, (999,))}
# Format, head_dim, mask, compute capability
BACKWARD = (
    ("bf16", 128, "all", 90),
    ("bf16", 256, "causal", 90),
    ("fp32", 128, "none", 89),
)
# head_dim, Br, causal, windowed, unaligned, masked, padded, of e4m3fn the promotion, and rows and keys that share a scale
HOPPER = (
    (64, 192, True, False, False, True, False, None, None),
    (128, 128, True, False, True, True, False, None, None),
    (128, 128, False, False, False, False, False, None, None),
    *((dim, 128, True, True, True, True, True, None, None) for dim in (64, 128)),
    *((256, 128, True, windowed, True, True, True, None, None) for windowed in (False, True)),
    *((64, br, True, False, False, True, False, 1, None) for br in (128, 192)),
    (128, 128, True, False, False, True, False, 1, None),
    (256, 128, True, False, False, True, False, 0, None),
    (128, 128, True, False, False, True, False, 1, (0, 0, 0)),
    *((dim, 128, True, False, False, True, False, int(dim < 256), (128, 128, 128)) for dim in (64, 128, 256)),
    *((128, 128, True, False, True, True, False, 0, scales) for scales in (None, (128, 128, 128))),
    *((64, 192, True, False, False, True, False, None, None, split) for split in ((16, False), (16, True))),
    *((128, 128, True, False, True, True, padded, None, None, (16, padded)) for padded in (False, True)),
)
# head_dim, causal, windowed, masked, padded
HOPPER_BACKWARD = tuple((dim, True, windowed, True, True) for dim in (128, 64) for windowed in (False, True))
# Sum, causal, windowed, ragged
HOPPER_WIDE = tuple((sums, True, windowed, sums == "dq") for sums in ("dq", "dk", "dv") for windowed in (False, True))

# head_dim, format, what shares a scale, rotated
QUANTISER = ((128, "bf16", "block", False), (128, "bf16", "block", True), (256, "bf16", "head", True))


def compile_for(kernel: Any, values: dict[str, Any], types: dict[str, Any], capability: int, options: dict[str, Any]) -> Any:
    """A kernel for a GPU that is not there: constants by name, types of the other arguments, all divisible by 16.

    An argument with named fields has a type for each; a field that is `1` is that constant.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    names = kernel.arg_names
    signature = {name: "constexpr" if name in values else types.get(name, "i32") for name in names}
    constants: dict[tuple[int, ...], Any] = {(names.index(name),): value for name, value in values.items()}
    divisible: list[tuple[int, ...]] = []
    for i, name in enumerate(names):
        kind = signature[name]
        if isinstance(kind, tuple):
            constants |= {(i, j): 1 for j, part in enumerate(kind) if part == "1"}
            divisible += [(i, j) for j, part in enumerate(kind) if part[0] in "*i"]
            signature[name] = type(kind)(*("constexpr" if part == "1" else part for part in kind))  # type: ignore[call-arg]
        elif kind[0] in "*i":
            divisible.append((i,))
    made = Source(kernel, signature, constants, {place: [["tt.divisibility", 16]] for place in divisible})
    return triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options)


def needs(kernel: Any, capability: int) -> dict[str, Any]:
    """Registers, bytes of stack, spills and shared memory, and what the assembler warns of: C75xx says that products wait."""
    from triton import knobs

    target = "sm_90a" if capability == 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(kernel.asm["ptx"])
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target}", str(file), "-o", str(file.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def most(pattern: str) -> int:
        return max(int(count) for count in re.findall(pattern, log))

    return {
        "registers": most(r"Used (\d+) registers"),
        "stack": most(r"(\d+) bytes stack frame"),
        "spills": most(r"(\d+) bytes spill stores"),
        "warnings": re.findall(r"C75\d\d", log),
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "cut": kernel.asm["ptx"].count("cvt.rz.f16.f32"),
        "shared": kernel.metadata.shared,
        "capability": capability,
    }


def portable_forward(name: str, dim: int, queries: int, capability: int) -> list[dict[str, Any]]:
    """The forward kernel for a request, with its launch and the bound on its shared memory."""
    attend, gpu = Triton(Format.parse(name)), launch.Device(f"sm_{capability}", SHARED[capability])
    chosen = launch.choose(attend.fmt, dim, queries, Mask(), gpu)
    tiling = Tiling(chosen.br, chosen.bc)
    request = portable.Request(attend.precision, tiling, attend.softmax, warps=chosen.warps, stages=chosen.stages)
    kernel = _portable_forward(request, name, dim, Mask(), capability)
    bounds = {"bound": launch.shared_bytes(chosen, attend.fmt, dim), "limit": gpu.shared}
    return [{"format": name, "dim": dim} | bounds | needs(kernel, capability)]


def portable_ranged(name: str, dim: int) -> list[dict[str, Any]]:
    """Layouts of the products and of the sums of a row, and contracted operations, of the forms that must have the same bits."""
    attend, gpu, made = Triton(Format.parse(name)), launch.Device("sm_90", SHARED[90]), []
    chosen = launch.choose(attend.fmt, dim, launch.ROWS + 1, MASKS["causal"], gpu)
    for mask, parallel in ((MASKS["none"], False), (MASKS["causal"], False), (MASKS["none"], True)):
        settings = attend.precision, Tiling(chosen.br, chosen.bc, split_size=512), attend.softmax
        request = portable.Request(*settings, warps=chosen.warps, stages=chosen.stages, parallel=parallel)
        kernel = _portable_forward(request, name, dim, mask, 90)
        ir, ptx = kernel.asm["ttgir"], kernel.asm["ptx"]
        layouts = sorted(set(re.findall(r"#ttg.nvidia_mma<.*>", ir)))
        sums = sorted(set(re.findall(r"\}\) : \((tensor<\d+x\d+xf32, #\w+>)\)", ir)))
        made.append({"layouts": layouts, "sums": sums, "contracted": ptx.count("fma.rn.f32")} | needs(kernel, 90))
    return made


def _portable_forward(request: portable.Request, name: str, dim: int, mask: Mask, capability: int) -> Any:
    dtypes = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16", "e4m3fn": "*fp8e4nv"}
    out = "*fp32" if request.parallel else dtypes.get(request.precision.output.to.name, "*fp16")
    view = forward.View(dtypes[name], "i32", "i32", "i32", "1")
    types = {"q": view, "k": view, "v": view, "out": out, "lse": "*fp32"}
    types |= {"lengths": "*i32", "bounds": "*i32"}
    types |= {"factors": forward.Factors(*["fp32"] * 4), "sizes": forward.Sizes(*["i32"] * 7)}
    made = portable.code(request, mask, dim, dim**-0.5)
    values = {"CODE": made._replace(words=name == "e4m3fn" and made.tile.br == 16)}
    return compile_for(forward.attention, values, types, capability, portable._options(request, request.launch))


def portable_backward(name: str, dim: int, masked: str, capability: int) -> list[dict[str, Any]]:
    """The backward kernels for a request, with the bounds on their shared memory; `delta` is `walk` where it makes delta."""
    fmt, gpu, mask = Format.parse(name), launch.Device(f"sm_{capability}", SHARED[capability]), MASKS[masked]
    launches = launch.choose_backward(fmt, dim, mask, gpu)
    request = portable.BackwardRequest(BackwardPrecision.kernel(fmt), Recompute(exponential=Exponential.EXP2), launches)
    tokens, factors = 1000 if masked == "all" else 1024, device.Factors(dim**-0.5, 1.44, dim**-0.5)
    types: dict[str, Any] = dict.fromkeys(("q", "k", "v", "do"), forward.View(f"*{name}", "i32", "i32", "i32", "1"))
    types |= dict.fromkeys(("dq", "dk", "dv"), f"*{name}") | {"saved": device.Saved("*fp32", "*fp32"), "lengths": "*i32"}
    types |= {"factors": device.Factors(*["fp32"] * 3), "sizes": forward.Sizes(*["i32"] * 7)}
    made = []
    for which, chosen in (("dk_dv", launches.keys), ("walk", launches.rows), ("delta", launches.rows)):
        of_rows = which != "dk_dv"
        values: dict[str, Any] = {"CODE": portable.backward_code(request, of_rows, mask, (tokens, tokens, dim), factors)}
        values |= {"DELTA": which == "delta"} if of_rows else {}
        options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
        kernel = compile_for(device.walk if of_rows else device.dk_dv, values, types, capability, options)
        bounds = {"bound": launch.backward_shared_bytes(chosen, fmt, dim, of_rows), "limit": gpu.shared}
        made.append({"kernel": which, "format": name, "dim": dim, "mask": masked} | bounds | needs(kernel, capability))
    return made


def descriptor(dtype: Any, *block: int) -> str:
    """The type of a tensor that the copy engine moves in such blocks."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for([1, 1, *block], dtype)
    if len(block) == 1:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return _described(dtype, (1, 1, *block), layout)


def _described(dtype: Any, block: tuple[int, ...], layout: Any) -> str:
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{layout!r}>"


def hopper(
    dim: int,
    br: int,
    causal: bool,
    windowed: bool,
    unaligned: bool,
    masked: bool,
    padded: bool,
    promotion: int | None,
    blocks: tuple[int, int, int] | None,
    split: tuple[int, bool] | None = None,
) -> list[dict[str, Any]]:
    """The forward kernel for Hopper GPUs."""
    from triton.experimental.gluon import language as gl

    from numdev.attention.kernels.hopper import forward, host
    from numdev.attention.kernels.hopper.launch import NARROW, SHAPES

    narrow = promotion is not None
    shape, dtype = (NARROW if narrow else SHAPES)[dim, br], gl.float8e4nv if narrow else gl.bfloat16
    sizes, own = (shape.bc, dim, shape.groups, shape.stages), (promotion, 8) if narrow else ()
    own = (*own, True, *blocks) if blocks else own
    flags = causal, windowed, unaligned, masked, padded
    code = forward.Code(*sizes, dtype, *flags, shape.registers, 0.0, *own)
    if split:
        code = code._replace(split=split[0], parts=split[1])
    values: dict[str, Any] = {"CODE": code, **({} if blocks else {"scales": None})}
    values |= {} if code.parts else {"states": None, "sums": None}
    rows, keys, values_ = descriptor(dtype, 64, dim), descriptor(dtype, shape.bc, dim), descriptor(dtype, shape.bc, dim)
    if narrow:
        made = host._groups(1, shape.bc, dim)(torch.empty(0))
        keys, values_ = _described(dtype, tuple(made.block_shape), made.layout), descriptor(dtype, dim, shape.bc)
    out = descriptor(gl.float16 if narrow else dtype, 64, dim // 2 if dim > 128 else dim)
    types = {
        "d_q": rows,
        "d_k": keys,
        "d_v": values_,
        "d_o": out,
        "lse": "*fp32",
        "tiles": "*i32",
        "scale": "fp32",
        **dict.fromkeys(("scales", "states", "sums"), "*fp32"),
    }
    kernel = compile_for(forward.attention, values, types, 90, {"num_warps": 4, "enable_fp_fusion": not split})
    return [
        {"dim": dim, "br": br, "windowed": windowed, "promotion": promotion or 0, "scaled": blocks is not None, "split": split}
        | needs(kernel, 90)
    ]


def hopper_backward(dim: int, causal: bool, windowed: bool, masked: bool, padded: bool) -> list[dict[str, Any]]:
    """The backward kernel for Hopper GPUs."""
    from triton.experimental.gluon import language as gl

    from numdev.attention.kernels.hopper import backward
    from numdev.attention.kernels.hopper.launch import QUERIES, REGISTERS, STAGES

    br = QUERIES[dim]
    tiles, keys, rows = descriptor(gl.bfloat16, br, dim), descriptor(gl.bfloat16, 64, dim), descriptor(gl.float32, br)
    types = {"d_q": tiles, "d_do": tiles, "d_k": keys, "d_v": keys, "d_dk": keys, "d_dv": keys, "d_lse2": rows, "d_delta": rows}
    types |= {"lengths": "*i32", "scale2": "fp32", "scale": "fp32", "d_dq": descriptor(gl.float32, 128, 32), "counters": "*i32"}
    values = {"CODE": backward.Code(br, dim, STAGES, gl.bfloat16, causal, windowed, masked, padded, REGISTERS)}
    kernel = compile_for(backward.gradients, values, types, 90, {"num_warps": 4})
    return [{"dim": dim, "flags": (causal, windowed, masked, padded)} | needs(kernel, 90)]


def hopper_wide(sums: str, causal: bool, windowed: bool, ragged: bool) -> list[dict[str, Any]]:
    """A backward kernel for Hopper GPUs at d = 256."""
    from triton.experimental.gluon import language as gl

    from numdev.attention.kernels.hopper import wide

    tiles, rows = descriptor(gl.bfloat16, 64, 256), descriptor(gl.float32, 64)
    types: dict[str, Any] = dict.fromkeys(("d_x1", "d_x2", "d_y1", "d_y2", "d_out"), tiles)
    halves = sums == "dk" or (sums == "dq" and causal)
    if halves:
        types["d_y2"] = descriptor(gl.bfloat16, 64, 128)
    types |= {"d_lse2": rows, "d_delta": rows, "scale2": "fp32", "scale": "fp32"}
    values = {"CODE": wide.Code(256, gl.bfloat16, sums, sums == "dv", halves, causal, windowed, ragged, 240)}
    kernel = compile_for(wide.gradient, values, types, 90, {"num_warps": 4})
    return [{"dim": 256, "sums": sums} | needs(kernel, 90)]


def operation(name: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernel of an operation in `numdev.operations`; sizes are whole numbers, and eps is not."""
    import triton

    module = importlib.import_module(f"numdev.operations.{name}")
    function = getattr(module, f"_{name}").__wrapped__
    function.__globals__["tl"] = triton.language
    kernel = triton.jit(function)
    types = {each: "*i32" if each == "y_ptr" and name == "logprob" else "*bf16" for each in kernel.arg_names if "_ptr" in each}
    types |= {each: "*fp32" for each in ("lse_ptr", "c_ptr", "s_ptr", "rms_ptr", "g_ptr") if each in types} | {"eps": "fp32"}
    return [{"operation": name} | needs(compile_for(kernel, values, types, 90, {}), 90)]


# Operation, constants
OPERATIONS = (
    ("matmul", {"BM": 16, "BN": 64, "BK": 64}),
    ("rmsnorm", {"BLOCK": 1024}),
    ("router", {"K": 8, "SIGMOID": False, "EXPERTS": 64, "BLOCK": 128}),
    ("scan", {"DELTA": True, "BK": 64, "BV": 16}),
    ("logprob", {"BR": 16, "BC": 64, "BK": 64}),
)


def quantiser(dim: int, name: str, shared: str, hadamard: bool) -> list[dict[str, Any]]:
    """The kernel that makes codes with scales."""
    from numdev import Cast
    from numdev.arithmetic.quantise import Quantised, Scale
    from numdev.attention.kernels import quantiser as kernels

    inputs = Quantised(Cast.parse("e4m3fn"), Scale(shared), hadamard=hadamard)
    values: dict[str, Any] = {"CODE": kernels.Code(*kernels.parts(inputs), dim, False)}
    values |= {name: None for name, has in (("rotation", hadamard), ("largest", shared != "block")) if not has}
    side = kernels.Side(f"*{name}", "i32", "i32", "i32", "1", "*fp8e4nv", *["i32"] * 6)
    types = dict.fromkeys("qkv", side) | {"scales": "*fp32", "lengths": "*i32", "rotation": f"*{name}", "largest": "*i32"}
    kernel = compile_for(kernels.quantise, values, types, 90, {"num_warps": 8 if dim > 128 else 4})
    return [{"dim": dim, "format": name} | needs(kernel, 90)]


KINDS: dict[str, Any] = {
    "operation": (operation, OPERATIONS),
    "portable": (portable_forward, PORTABLE),
    "ranged": (portable_ranged, RANGED),
    "backward": (portable_backward, BACKWARD),
    "hopper": (hopper, HOPPER),
    "hopper_backward": (hopper_backward, HOPPER_BACKWARD),
    "hopper_wide": (hopper_wide, HOPPER_WIDE),
    "quantiser": (quantiser, QUANTISER),
}


def in_a_process(kind: str) -> list[dict[str, Any]]:
    """The needs of the kernels for the requests of a kind."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root, command = Path(__file__).resolve().parents[3], [sys.executable, "-m", __name__, kind]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert made.returncode == 0, made.stderr[-2000:]
    kernels: list[dict[str, Any]] = json.loads(made.stdout.splitlines()[-1])
    return kernels


pytestmark = pytest.mark.slow


def test_the_chosen_tile_fits_the_gpu() -> None:
    """FP32 at d = 256 on a GPU of 99 KB, where 64 x 32 needs 139,520 bytes; and without spills on an H100, where 128 x 64 in 4
    warps had 14 KB of them at d = 256.
    """
    for kernel in in_a_process("portable"):
        assert kernel["shared"] <= kernel["bound"] <= kernel["limit"], kernel
        if kernel["capability"] == 90:
            assert kernel["stack"] == 0, kernel
            assert kernel["cut"] == 0, "E4M3 is reached by one rounding"


def test_the_forms_with_splits_of_a_fixed_size_multiply_and_add_alike() -> None:
    """In one tile by the same instructions in the same layouts, with no product contracted with a sum."""
    kernels = in_a_process("ranged")
    for each in range(0, len(kernels), 3):
        assert len({str((kernel["layouts"], kernel["sums"])) for kernel in kernels[each : each + 3]}) == 1, kernels[each]
        assert all(kernel["contracted"] == 0 < kernel["wgmma"] for kernel in kernels[each : each + 3])
        assert all(kernel["layouts"] and kernel["sums"] for kernel in kernels[each : each + 3])


def test_the_chosen_backward_tiles_fit_and_stay_in_registers() -> None:
    """Under the policy of kernels 16-bit formats spill nothing for compute capability 9.0; up to d = 128 no product waits.

    C75xx is what the assembler says where it makes the products of a warp group wait for each other.
    """
    for kernel in in_a_process("backward"):
        assert kernel["shared"] <= kernel["bound"] <= kernel["limit"], kernel
        if kernel["capability"] == 90 and kernel["format"] != "fp32":
            assert kernel["stack"] == kernel["spills"] == 0 or kernel["kernel"] == "delta", kernel
            assert kernel["wgmma"] > 0 or kernel["dim"] > 128, kernel
            assert not kernel["warnings"] or kernel["dim"] > 128, kernel


def test_the_kernels_of_operations_compile_without_spills() -> None:
    """The compiler takes fewer programs than the interpreter does."""
    for kernel in in_a_process("operation"):
        assert kernel["spills"] == 0, kernel


@pytest.mark.parametrize("kind", ["hopper", "hopper_backward", "hopper_wide"])
def test_the_hopper_kernels_keep_their_matrices_in_registers_and_their_products_in_flight(kind: str) -> None:
    """Forward, d = 256, a window, splits, scales and a second sum of P V leave a few scalars in memory: none of S, P or O.

    Backward it is addresses and counts, up to d = 128 most of them from one tile of keys to the next, as long as `hidden_zero`
    keeps those of stationary operands out of registers: 40 to 120 bytes. The least of the matrices that pass through an iteration
    are 64 bytes of a thread at d = 128 (P and dS in words), and 128 at d = 64 (the same) and 256 (P and dP): one more would show.
    """
    for kernel in in_a_process(kind):
        scalars = (kernel["dim"] == 256) + any(kernel.get(name) for name in ("promotion", "windowed", "split", "scaled"))
        most = 32 * scalars if kind == "hopper" else {64: 127, 128: 39 + 64, 256: 96}[kernel["dim"]]
        assert kernel["stack"] <= most, kernel
        assert not kernel["warnings"], kernel
        assert kernel["shared"] <= 227 * 1024, kernel


def test_the_quantiser_spills_nothing() -> None:
    for kernel in in_a_process("quantiser"):
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= SHARED[90], kernel


if __name__ == "__main__":
    compiled, requests = KINDS[sys.argv[1]]
    print(json.dumps([kernel for request in requests for kernel in compiled(*request)]))
