"""A small grid of kernels for compute-sanitizer, which sees every access out of bounds and every race in shared memory.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python experiments/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python experiments/sanitize.py

Without the caching allocator every tensor is an allocation of its own, so that reading past its end is seen.
"""

from __future__ import annotations

import torch

from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.triton import Kernel, Triton
from numdev.errors import Unsupported
from numdev.formats import BF16, E4M3FN, FP16, FP32
from numdev.mask import Mask
from numdev.precision import Precision
from numdev.tiling import Order, Tiling

# batch, heads, kv_heads, queries, keys, head_dim, mask
SHAPES = (
    (2, 4, 2, 37, 53, 64, Mask(causal=True)),
    (1, 2, 1, 1, 130, 128, Mask()),
    (2, 2, 2, 200, 200, 64, Mask(key_lengths=(200, 0))),
    (1, 2, 2, 129, 255, 128, Mask(causal=True)),
    (1, 1, 1, 70, 70, 40, Mask(window=9)),
    (1, 1, 1, 1, 1, 16, Mask()),
)


def main() -> None:
    count = 0
    for batch, heads, kv_heads, queries, keys, dim, mask in SHAPES:
        sizes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim))
        drawn = [torch.randn(size, device="cuda") for size in sizes]
        variants = [
            *(Triton(fmt, kernel=Kernel.PORTABLE) for fmt in (BF16, FP16, FP32, E4M3FN)),
            Triton(BF16, br=16, bc=16, order=Order.REVERSE, splits=2, kernel=Kernel.PORTABLE),
            *(Triton(fmt, kernel=Kernel.HOPPER) for fmt in (BF16, FP16)),
            Instrumented(Precision.parse("bf16"), Tiling(32, 32)),
        ]
        for variant in variants:
            q, k, v = variant.round_inputs(*drawn)
            try:
                found = variant(q, k, v, mask)
            except Unsupported as error:
                print(f"unsupported: {error}")
                continue
            golden = Exact()(q, k, v, mask).out
            torch.testing.assert_close(found.out.double(), golden, rtol=0.1, atol=0.1)  # it ran, no more: bounds are in the tests
            count += 1
    torch.cuda.synchronize()
    print(f"{count} launches")


if __name__ == "__main__":
    main()
