"""Compiles the Hopper backward kernels without a GPU and prints, as JSON, what each needs of one; see `tests.compiled`.

python -m tests.compiled_hopper_backward COUNT
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.compiled import assembled, compile_for

# Kernel, head_dim, causal, masked, padded, grouped
CHOSEN = (
    ("fused", 128, True, True, True, True),
    ("keys", 64, True, True, True, True),
    ("queries", 128, True, True, True, True),
    ("fused", 64, True, False, False, False),
    ("fused", 64, True, True, True, True),
    ("fused", 128, False, False, False, False),
    ("keys", 128, True, False, False, False),
    ("queries", 64, False, False, False, False),
)
LONG = 4096  # queries


def descriptor(dtype: Any, *block: int) -> str:
    """The type of a tensor that the copy engine moves in such blocks."""
    from triton.experimental.gluon import language as gl

    if len(block) == 1:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
        return f"tensordesc<fp32[1, 1, {block[0]}],{layout!r}>"
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, *block], dtype)
    return f"tensordesc<{dtype}[1, 1, {block[0]}, {block[1]}],{layout!r}>"


def of_keys(which: str, dim: int, *flags: bool) -> Any:
    """A kernel that owns keys: of the design with one kernel, or with two."""
    from triton.experimental.gluon import language as gl

    from numdev.attention.kernels import hopper_backward, hopper_backward_keys
    from numdev.attention.kernels.hopper_backward_host import REGISTERS
    from numdev.attention.kernels.hopper_backward_launch import FUSED, SPLIT
    from numdev.attention.kernels.hopper_backward_parts import Code

    shape = (FUSED if which == "fused" else SPLIT)[dim]
    tiles, keys, rows = descriptor(gl.bfloat16, shape.br, dim), descriptor(gl.bfloat16, 64, dim), descriptor(gl.float32, shape.br)
    types = {"d_q": tiles, "d_do": tiles, "d_k": keys, "d_v": keys, "d_dk": keys, "d_dv": keys, "d_lse2": rows, "d_delta": rows}
    types |= {"lengths": "*i32", "scale2": "fp32", "scale": "fp32", "d_dq": descriptor(gl.float32, 64, 64), "turns": "*i32"}
    causal, masked, padded, grouped = flags
    tile = (shape.br, dim, shape.stages, gl.bfloat16)
    code = Code(*tile, causal, masked, padded, grouped, shape.skewed, shape.pingpong, REGISTERS, 0)
    kernel = hopper_backward.gradients if which == "fused" else hopper_backward_keys.gradients_of_keys
    return compile_for(kernel, {"CODE": code}, types, 90, {"num_warps": 4})


def of_queries(dim: int, *flags: bool) -> Any:
    """The kernel that owns queries; with a mask that of few queries, without one that of many."""
    from triton.experimental.gluon import language as gl

    from numdev.attention.kernels import hopper_backward_queries
    from numdev.attention.kernels.hopper_backward_launch import queries_shape

    causal, masked, padded, _ = flags
    shape = queries_shape(dim, 1 if causal else LONG)
    rows, keys = descriptor(gl.bfloat16, 64, dim), descriptor(gl.bfloat16, shape.bc, dim)
    types = {"d_q": rows, "d_do": rows, "d_dq": rows, "d_k": keys, "d_v": keys, "lse2": "*fp32", "delta": "*fp32"}
    types |= {"lengths": "*i32", "scale2": "fp32", "scale": "fp32"}
    tile = (shape.bc, dim, shape.groups, shape.stages, gl.bfloat16)
    code = hopper_backward_queries.Code(*tile, causal, masked, padded, shape.registers)
    return compile_for(hopper_backward_queries.gradients_of_queries, {"CODE": code}, types, 90, {"num_warps": 4})


def compiled(count: int) -> list[dict[str, Any]]:
    """What each of the first of `CHOSEN` needs."""
    found = []
    for which, dim, *flags in CHOSEN[:count]:
        kernel = of_queries(dim, *flags) if which == "queries" else of_keys(which, dim, *flags)
        stack, warnings = assembled(kernel, 90)
        needs = {"shared": kernel.metadata.shared, "stack": stack, "warnings": warnings}
        found.append({"kernel": which, "dim": dim, "flags": flags} | needs)
    return found


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    print(json.dumps(compiled(int(sys.argv[1]))))
