"""What the casts cost: the instrumented kernel against `Tiled` and against the plain portable kernel, on one GPU.

    python -m benchmarks.instrumented

N = 16,384, d = 64, 16 heads, tiles of 64 x 64; medians of ten runs after warm-up, CUDA events.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from numdev.attention.instrumented import Instrumented
from numdev.attention.tiled import Tiled
from numdev.attention.triton import Kernel, Triton
from numdev.mask import Mask
from numdev.precision import Precision
from numdev.tiling import Tiling

N, D, HEADS = 16384, 64, 16


def seconds(run: Callable[[], object], repetitions: int = 10) -> float:
    times = []
    for _ in range(repetitions + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[2:])


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    q, k, v = (torch.rand(1, HEADS, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    tiling, mask = Tiling(64, 64), Mask()
    plain = seconds(lambda: Triton(br=64, bc=64, kernel=Kernel.PORTABLE)(q, k, v, mask))
    print(f"portable, bf16: {1e3 * plain:.2f} ms, {4 * HEADS * N * N * D / plain / 1e12:.0f} TFLOP/s")
    for name in ("kernel_bf16", "bf16", "fp16", "e4m3fn"):
        policy = Precision.parse(name)
        inputs = policy.round_inputs(q, k, v)
        fast = seconds(lambda inputs=inputs, policy=policy: Instrumented(policy, tiling)(*inputs, mask))
        slow = seconds(lambda inputs=inputs, policy=policy: Tiled(policy, tiling, count=False)(*inputs, mask), 3)
        against = f"{fast / plain:.2f} times plain; Tiled {slow:.3f} s, {slow / fast:.0f} times as long"
        print(f"{name}: instrumented {1e3 * fast:.2f} ms, {against}", flush=True)


if __name__ == "__main__":
    main()
