"""Compiles our kernels without a GPU and prints, as JSON, what each needs of one. A process of its own: tests interpret kernels.

python -m tests.compiled portable|hopper COUNT

COUNT is of how many requests, the most demanding ones first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Bytes of shared memory that a program may have, by compute capability: GeForce RTX 30, GeForce RTX 40 and L40, H100.
SHARED = {86: 101376, 89: 101376, 90: 232448}

# Format, head_dim, queries, compute capability
PORTABLE = (
    ("fp32", 256, 512, 86),
    ("bf16", 256, 512, 90),
    ("e4m3fn", 256, 512, 89),
    ("bf16", 128, 1, 89),
    ("fp32", 128, 512, 89),
    ("bf16", 256, 512, 89),
    ("fp16", 128, 512, 90),
    ("fp32", 256, 1, 86),
)
# head_dim, Br, causal, unaligned, masked, padded
HOPPER = (
    (64, 192, True, False, True, False),
    (128, 128, True, True, True, False),
    (256, 128, True, True, True, True),
    (64, 192, False, False, False, False),
    (64, 128, True, True, True, True),
    (128, 128, False, False, True, True),
    (256, 128, False, False, False, False),
    (256, 128, True, False, True, False),
)


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


def portable(count: int) -> list[dict[str, Any]]:
    from numdev.arithmetic.formats import Format
    from numdev.attention.kernels import forward, launch
    from numdev.attention.kernels import portable as host
    from numdev.attention.kernels.arguments import Factors, Sizes, View
    from numdev.attention.mask import Mask
    from numdev.attention.tiling import Tiling
    from numdev.attention.triton import Triton

    dtypes = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16", "e4m3fn": "*fp8e4nv"}
    found = []
    for name, dim, queries, capability in PORTABLE[:count]:
        attend = Triton(Format.parse(name))
        device = launch.Device(f"sm_{capability}", SHARED[capability])
        chosen = launch.choose(attend.fmt, dim, queries, Mask(), device)
        tiling = Tiling(chosen.br, chosen.bc)
        request = host.Request(attend.precision, tiling, attend.softmax, warps=chosen.warps, stages=chosen.stages)
        view = View(dtypes[name], "i32", "i32", "i32", "1")
        types = {"q": view, "k": view, "v": view, "out": dtypes.get(attend.format.name, "*fp16"), "lse": "*fp32"}
        types |= {"lengths": "*i32", "bounds": "*i32", "factors": Factors(*["fp32"] * 4), "sizes": Sizes(*["i32"] * 7)}
        values = {"CODE": request.code(Mask(), dim, dim**-0.5)}
        options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
        kernel = compile_for(forward.attention, values, types, capability, options)
        bound = launch.shared_bytes(chosen, attend.fmt, dim)
        needs = {
            "shared": kernel.metadata.shared,
            "bound": bound,
            "limit": device.shared,
            "stack": assembled(kernel, capability)[0],
        }
        found.append({"format": name, "dim": dim, "capability": capability} | needs)
    return found


def hopper(count: int) -> list[dict[str, Any]]:
    from triton.experimental.gluon import language as gl

    from numdev.attention.kernels import hopper as device
    from numdev.attention.kernels.hopper_host import SHAPES
    from numdev.attention.kernels.hopper_parts import Code

    def descriptor(rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], gl.bfloat16)
        return f"tensordesc<bf16[1, 1, {rows}, {columns}],{layout!r}>"

    found = []
    for dim, br, causal, unaligned, masked, padded in HOPPER[:count]:
        shape = SHAPES[dim, br]
        sizes = (shape.bc, dim, shape.groups, shape.stages)
        values = {"CODE": Code(*sizes, gl.bfloat16, causal, unaligned, masked, padded, shape.registers)}
        keys, rows = descriptor(shape.bc, dim), descriptor(64, dim)
        out = descriptor(64, dim // 2 if dim > 128 else dim)
        types = {"d_q": rows, "d_k": keys, "d_v": keys, "d_o": out, "lse": "*fp32", "tiles": "*i32", "scale": "fp32"}
        kernel = compile_for(device.attention, values, types, 90, {"num_warps": 4})
        stack, warnings = assembled(kernel, 90)
        found.append({"dim": dim, "br": br, "shared": kernel.metadata.shared, "stack": stack, "warnings": warnings})
    return found


def log_of_assembler(kernel: Any, capability: int) -> str:
    """What the assembler says of a compiled kernel: registers, bytes of stack and of spills, warnings."""
    from triton import knobs

    target = "sm_90a" if capability == 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(kernel.asm["ptx"])
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target}", str(file), "-o", str(file.with_suffix(".cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def assembled(kernel: Any, capability: int) -> tuple[int, list[str]]:
    """Bytes of stack, which hold what registers do not, and what the assembler warns of: C75xx says that products wait."""
    log = log_of_assembler(kernel, capability)
    stack = max(int(size) for size in re.findall(r"(\d+) bytes stack frame", log))
    return stack, re.findall(r"C75\d\d", log)


def in_a_process(module: str, *arguments: str) -> list[dict[str, Any]]:
    """What a module of this kind prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[1]
    made = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, env=environment, cwd=root)
    assert made.returncode == 0, made.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(made.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    print(json.dumps({"portable": portable, "hopper": hopper}[sys.argv[1]](int(sys.argv[2]))))
