"""Compiles the portable backward kernels without a GPU and prints, as JSON, what each needs of one; see `tests.compiled`.

python -m tests.compiled_backward chosen COUNT
python -m tests.compiled_backward dk_dv|walk|delta FORMAT HEAD_DIM none|causal|odd|all BR BC WARPS STAGES
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from tests.compiled import SHARED, compile_for, log_of_assembler

# Format, head_dim, mask, policy, compute capability
CHOSEN = (
    ("bf16", 128, "all", "kernel", 90),
    ("bf16", 256, "causal", "kernel", 90),
    ("fp32", 128, "none", "kernel", 89),
    ("bf16", 64, "causal", "uniform", 90),
    *(("bf16", 64, mask, "kernel", 90) for mask in ("none", "causal", "odd", "all")),
    *(("bf16", 128, mask, "kernel", 90) for mask in ("none", "causal", "odd")),
    ("fp16", 96, "all", "kernel", 90),
    ("fp32", 64, "causal", "kernel", 90),
    ("bf16", 128, "causal", "kernel", 89),
)


def masks() -> dict[str, Any]:
    """`odd` is causal with lengths that tiles do not divide."""
    from numdev.attention.mask import Mask

    return {"none": Mask(), "causal": Mask(causal=True), "odd": Mask(causal=True), "all": Mask(True, 1000, (999,))}


def assembled(kernel: Any, capability: int) -> dict[str, Any]:
    """Registers, bytes of stack and of spills, and what the assembler warns of: C75xx says that products wait."""
    log = log_of_assembler(kernel, capability)
    if os.environ.get("SHOW"):
        print(log, file=sys.stderr)

    def most(pattern: str) -> int:
        return max(int(found) for found in re.findall(pattern, log))

    return {
        "registers": most(r"Used (\d+) registers"),
        "stack": most(r"(\d+) bytes stack frame"),
        "spills": most(r"(\d+) bytes spill stores"),
        "warnings": re.findall(r"C75\d\d", log),
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "shared": kernel.metadata.shared,
    }


def compiled(which: str, name: str, dim: int, masked: str, launch: Any, capability: int, kind: str = "kernel") -> dict[str, Any]:
    """One of the two kernels for one request; `delta` is `walk` where it makes delta."""
    from numdev.arithmetic.formats import Format
    from numdev.attention.kernels import backward, backward_host
    from numdev.attention.kernels.arguments import Sizes, View
    from numdev.attention.kernels.backward_arguments import Factors, Saved
    from numdev.attention.kernels.backward_launch import Launches
    from numdev.attention.precision import BackwardPrecision
    from numdev.attention.softmax import Exponential, Recompute

    tokens = 1000 if masked in ("odd", "all") else 1024
    precision = getattr(BackwardPrecision, kind)(Format.parse(name))
    exactly = kind != "kernel"
    request = backward_host.Request(precision, Recompute(exponential=Exponential.EXP2), Launches(launch, launch), exactly=exactly)
    of_rows, view = which != "dk_dv", View(f"*{name}", "i32", "i32", "i32", "1")
    gradient = "*fp32" if exactly else f"*{name}"
    values: dict[str, Any] = {
        "CODE": request.code(of_rows, masks()[masked], (tokens, tokens, dim), Factors(dim**-0.5, 1.44, dim**-0.5))
    }
    if of_rows:
        values["DELTA"] = which == "delta"
    types = {"q": view, "k": view, "v": view, "do": view, "dq": gradient, "dk": gradient, "dv": gradient, "lengths": "*i32"}
    types |= {"saved": Saved("*fp32", "*fp32"), "factors": Factors(*["fp32"] * 3), "sizes": Sizes(*["i32"] * 7)}
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": not exactly}
    kernel = compile_for(backward.walk if of_rows else backward.dk_dv, values, types, capability, options)
    return {"kernel": which, "format": name, "dim": dim, "mask": masked, "policy": kind, "capability": capability} | assembled(
        kernel, capability
    )


def chosen(count: int) -> list[dict[str, Any]]:
    """Both kernels of the first of `CHOSEN`, with the launches that they get, and the bounds on shared memory."""
    from numdev.arithmetic.formats import Format
    from numdev.attention.kernels import backward_launch
    from numdev.attention.kernels.launch import Device

    found = []
    for name, dim, masked, kind, capability in CHOSEN[:count]:
        fmt, device = Format.parse(name), Device(f"sm_{capability}", SHARED[capability])
        launches = backward_launch.choose(fmt, dim, masks()[masked], device)
        for which, launch in (("dk_dv", launches.keys), ("walk", launches.rows), ("delta", launches.rows)):
            needs = {"bound": backward_launch.shared_bytes(launch, fmt, dim, which != "dk_dv"), "limit": device.shared}
            found.append(compiled(which, name, dim, masked, launch, capability, kind) | needs)
    return found


def one(which: str, name: str, dim: str, masked: str, *sides: str) -> dict[str, Any]:
    """One kernel for a launch of one's own."""
    from numdev.attention.kernels.launch import Launch

    return compiled(which, name, int(dim), masked, Launch(*map(int, sides)), 90)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    print(json.dumps(chosen(int(sys.argv[2])) if sys.argv[1] == "chosen" else one(*sys.argv[1:])))
