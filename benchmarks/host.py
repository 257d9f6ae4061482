"""Host time of a call: what Python, torch and Triton take before a kernel can run.

    python -m benchmarks.host [--n 512]

Microseconds: the best of 20 rounds of 300 calls that nobody waits for, on tensors so short that the GPU keeps up. BF16, batch 1,
8 heads, d = 128. A launch of Triton alone, of a kernel with four arguments, says how fast the machine is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import environment
from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.tiling import Tiling
from numdev.attention.triton import Kernel, Triton, TritonBackward

CALLS, ROUNDS = 300, 20
Call = Callable[[], object]


@triton.jit  # type: ignore[untyped-decorator]
def _nothing(a, b, n, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(a + tl.arange(0, SIDE), tl.load(b + tl.arange(0, SIDE)), mask=tl.arange(0, SIDE) < n)


def measure(run: Call) -> float:
    """Microseconds of a call."""
    for _ in range(20):
        run()
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return 1e6 * best


def contenders(n: int) -> dict[str, Call]:
    q, k, v, do = (torch.randn(1, 8, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    sdpa, mask = torch.nn.functional.scaled_dot_product_attention, Mask()

    def cudnn() -> object:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return sdpa(q, k, v)

    runs: dict[str, Call] = {
        "a launch of Triton": lambda: _nothing[(1,)](q, k, n, 16),
        "sdpa": lambda: sdpa(q, k, v),
        "sdpa, cuDNN by name": cudnn,
    }
    out = sdpa(leaves[0], leaves[1], leaves[2])
    runs["sdpa backward"] = lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)
    for kernel in (Kernel.HOPPER, Kernel.PORTABLE):
        forward = Triton(kernel=kernel)
        backward = TritonBackward(forward, kernel=kernel)
        saved = forward.saved(forward(q, k, v, mask))
        runs[f"numdev {kernel.value}"] = lambda forward=forward: forward(q, k, v, mask)  # type: ignore[misc]
        runs[f"numdev {kernel.value} backward"] = lambda backward=backward, saved=saved: backward.backward(  # type: ignore[misc]
            q, k, v, do, saved, mask
        )
    instrumented = Instrumented(Precision.parse("bf16"), Tiling(64, 64))
    return runs | {"numdev instrumented": lambda: instrumented(q, k, v, mask)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=256, help="queries and keys")
    options = parser.parse_args()
    print(environment())
    for name, run in contenders(options.n).items():
        print(f"{name:28} {measure(run):6.1f} us", flush=True)


if __name__ == "__main__":
    main()
