"""The cost of the casts: the instrumented kernel against `Tiled` and against the plain portable kernel, on one GPU.

    python -m benchmarks.instrumented

N = 16,384, d = 64, 16 heads, tiles of 64 x 64; exp2; inputs as each holds them; `numdev.measurement.speed`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.attention.triton import Kernel, Triton
from numdev.measurement.speed import Budget, timed

N, D, HEADS = 16384, 64, 16
DEVICE = torch.device("cuda")


def seconds(run: Callable[[], object], calls: int = 10) -> float:
    return timed(run, DEVICE, Budget(1e-3, calls, calls)).latency


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    drawn = [torch.rand(1, HEADS, N, D, device=DEVICE) for _ in range(3)]
    tiling, mask, softmax = Tiling(64, 64), Mask(), OnlineSoftmax(exp=Exponential.EXP2)
    kernel = Triton(br=64, bc=64, kernel=Kernel.PORTABLE)
    inputs = [t.to(kernel.storage) for t in kernel.round_inputs(*drawn)]
    plain = seconds(lambda: kernel(*inputs, mask))
    print(f"portable, bf16: {1e3 * plain:.2f} ms, {4 * HEADS * N * N * D / plain / 1e12:.0f} TFLOP/s")
    for name in ("kernel_bf16", "bf16", "fp16", "e4m3fn"):
        policy = Precision.parse(name)
        instrumented, tiled = Instrumented(policy, tiling, softmax), Tiled(policy, tiling, softmax, count=False)
        rounded = policy.round_inputs(*drawn)
        stored = [t.to(instrumented.storage) for t in rounded]
        fast = seconds(lambda run=instrumented, stored=stored: run(*stored, mask))
        slow = seconds(lambda run=tiled, rounded=rounded: run(*rounded, mask), 3)
        against = f"{fast / plain:.2f} times plain; Tiled {slow:.3f} s, {slow / fast:.0f} times as long"
        print(f"{name}: instrumented {1e3 * fast:.2f} ms, {against}", flush=True)


if __name__ == "__main__":
    main()
