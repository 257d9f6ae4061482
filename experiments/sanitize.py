"""A small grid of kernels for compute-sanitizer, which sees every access out of bounds and every race in shared memory.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python experiments/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python experiments/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python experiments/sanitize.py --backward
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python experiments/sanitize.py --backward
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool synccheck python experiments/sanitize.py --only HOPPER

Without the caching allocator every tensor is an allocation of its own, so that reading past its end is seen.

Racecheck reports hazards in the Hopper kernels on the words by which the compiler tells each warp group what to run: in the
machine code a store before the named barrier at which all warp groups meet, and a load after it; and, backward, on the number
of a tile that one warp passes on to others by a barrier in shared memory. No matrix of the kernels is in a report. `--control`
runs a kernel whose warp groups do nothing but pass a word on by such barriers; it has the same reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32
from numdev.arithmetic.quantise import Scale
from numdev.attention.base import Attention, Backward
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.instrumented import Instrumented, InstrumentedBackward
from numdev.attention.kernels.hopper.primitives import barriers, thread_barrier
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Triton, TritonBackward
from numdev.errors import Unsupported

# batch, heads, kv_heads, queries, keys, head_dim, mask
SHAPES = (
    (2, 4, 2, 37, 53, 64, Mask(causal=True)),
    (1, 2, 1, 1, 130, 128, Mask()),
    (2, 2, 2, 200, 200, 64, Mask(key_lengths=(200, 0))),
    (1, 2, 2, 129, 255, 128, Mask(causal=True)),
    (1, 1, 1, 320, 320, 64, Mask(causal=True)),
    (2, 2, 1, 130, 200, 256, Mask(causal=True, key_lengths=(200, 77))),
    (1, 8, 2, 1, 700, 128, Mask(key_lengths=(650,))),
    (2, 8, 2, 3, 3001, 128, Mask()),
    (1, 2, 2, 5, 77, 100, Mask(causal=True)),
    (1, 1, 1, 70, 70, 40, Mask(window=9)),
    (1, 2, 1, 200, 330, 64, Mask(causal=True, window=100)),
    (1, 2, 1, 200, 330, 128, Mask(causal=True, window=100)),
    (1, 2, 1, 200, 330, 256, Mask(causal=True)),
    (2, 2, 1, 140, 512, 128, Mask(key_lengths=(512, 256))),
    (1, 1, 1, 1, 1, 16, Mask()),
    (2, 40, 40, 200, 200, 64, Mask(causal=True, key_lengths=(200, 77))),  # more tiles of keys than multiprocessors
    (2, 40, 40, 200, 200, 128, Mask(causal=True, key_lengths=(200, 77))),
)


@gluon.jit
def fill(c: gl.constexpr, out, turn, word):
    """Group c waits until it is its turn, writes the word that it gets to its part of `out`, and passes the next one on."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(turn.index(c), 0)
    value = gl.max(word.index(c).load(layout), 0)
    gl.store(out + c * 128 + gl.arange(0, 128, layout), gl.full([128], 0, gl.int32, layout) + value)
    word.index((c + 1) % 3).store(gl.full([1], 0, gl.int32, layout) + value + 1)
    thread_barrier()
    mbarrier.arrive(turn.index((c + 1) % 3), count=1)


@gluon.jit
def warp_groups_alone(out):
    """Three warp groups that take turns, and pass a word on, which the barriers protect."""
    turn = barriers(3, 1)
    word = gl.allocate_shared_memory(gl.int32, [3, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    word.index(0).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    thread_barrier()
    mbarrier.arrive(turn.index(0), count=1)
    gl.warp_specialize(
        [(fill, (0, out, turn, word)), (fill, (1, out, turn, word)), (fill, (2, out, turn, word))], [4, 4], [24, 24]
    )


def control() -> None:
    out = torch.full((3, 128), -1, dtype=torch.int32, device="cuda")
    warp_groups_alone[(1,)](out, num_warps=4)
    torch.testing.assert_close(out, torch.arange(3, dtype=torch.int32, device="cuda")[:, None].expand(3, 128))
    print("warp groups alone: 1 launch")


def forward_variants() -> list[Attention]:
    return [
        *(Triton(fmt, kernel=Kernel.PORTABLE) for fmt in (BF16, FP16, FP32, E4M3FN)),
        Triton(BF16, br=16, bc=16, order=Order.REVERSE, splits=2, kernel=Kernel.PORTABLE),
        *(Triton(fmt, kernel=Kernel.HOPPER) for fmt in (BF16, FP16)),
        Triton(BF16, br=192, kernel=Kernel.HOPPER),
        *(Triton(BF16, br=br, kernel=Kernel.HOPPER, split_size=128) for br in (128, 192)),
        *(
            Triton(
                E4M3FN,
                kernel=Kernel.HOPPER,
                softmax=OnlineSoftmax(exp=Exponential.EXP2, p_scale=256.0),
                promotion=n,
                quantise=inputs,
            )
            for n, inputs in ((1, None), (1, Precision.fp8().inputs), (0, Precision.fp8(Scale.HEAD).inputs))
        ),
        Instrumented(Precision.parse("bf16"), Tiling(32, 32)),
    ]


def backward_variants() -> list[Backward]:
    return [
        TritonBackward(Triton(kernel=Kernel.PORTABLE), kernel=Kernel.PORTABLE),
        TritonBackward(Triton(), kernel=Kernel.HOPPER),
        InstrumentedBackward(
            Instrumented(Precision.parse("bf16"), Tiling(32, 32)), BackwardPrecision.parse("bf16"), Tiling(32, 32)
        ),
    ]


def run_forward(variant: Attention, drawn: list[Tensor], mask: Mask) -> None:
    """One launch; that it ran and is no nonsense, no more: bounds are in the tests."""
    q, k, v = variant.round_inputs(*drawn[:3])
    found = variant(q, k, v, mask)
    torch.testing.assert_close(found.out.double(), Exact()(q, k, v, mask).out, rtol=0.1, atol=0.1)


def run_backward(variant: Backward, drawn: list[Tensor], mask: Mask) -> None:
    """Launches a backward pass after its forward pass."""
    inputs = variant.round_inputs(*drawn)
    found, golden = variant(*inputs, mask), ExactBackward()(*inputs, mask)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(golden, name), rtol=0.1, atol=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", action="store_true", help="a kernel of warp groups that pass a word on, for racecheck")
    parser.add_argument("--backward", action="store_true", help="the kernels of the backward pass in place of the forward ones")
    parser.add_argument("--only", default="", help="run the kernels whose `repr` contains this text, such as HOPPER")
    given = parser.parse_args()
    if given.control:
        control()
        return
    every: list[Any] = backward_variants() if given.backward else forward_variants()
    run: Callable[..., None] = run_backward if given.backward else run_forward
    count, variants = 0, [each for each in every if given.only in repr(each)]
    for batch, heads, kv_heads, queries, keys, dim, mask in SHAPES:
        q, k, v = (batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim)
        drawn = [torch.randn(size, device="cuda") for size in (q, k, v, q)]
        for variant in variants:
            try:
                run(variant, drawn, mask)
            except Unsupported as error:
                print(f"unsupported: {error}")
                continue
            count += 1
    torch.cuda.synchronize()
    print(f"{count} launches")
    if not count:
        raise SystemExit(f"no kernel has {given.only} in its settings")


if __name__ == "__main__":
    main()
