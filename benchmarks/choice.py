"""From how many scores on the instrumented kernel pays for its compiling: the threshold of `numdev.attention.instrumented`.

    python -m benchmarks.choice

Tiled attention on one GPU, d = 64, tiles of 64 x 64: the seconds in which a kernel is compiled for a policy, in a cache of its
own, and those of a call by the kernel and by tensor operations, which count as they do by default. The last columns are how many
calls repay the compiling, and the scores of a call at which ten replicates do.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import torch

from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling

POLICIES = ("bf16", "fp16", "kernel_bf16", "e4m3fn")
LENGTHS, HEADS, D = (1024, 2048, 4096, 8192, 16384), (1, 16), 64
REPLICATES = 10


def seconds(run: Callable[[], object], calls: int = 1) -> float:
    """The mean time of a call, all work on the GPU included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure(name: str) -> None:
    policy, tiling, softmax, mask = Precision.parse(name), Tiling(64, 64), OnlineSoftmax(), Mask()
    kernel, tensors = Instrumented(policy, tiling, softmax), Tiled(policy, tiling, softmax, count=True)
    compiling = 0.0
    for heads in HEADS:
        for n in LENGTHS:
            inputs = policy.round_inputs(*(torch.rand(1, heads, n, D, device="cuda") for _ in range(3)))
            first = seconds(lambda inputs=inputs: kernel(*inputs, mask))
            fast = seconds(lambda inputs=inputs: kernel(*inputs, mask), 5)
            compiling = compiling or first - fast
            tensors(*inputs, mask)
            slow = seconds(lambda inputs=inputs: tensors(*inputs, mask))
            scores, calls = heads * n * n, compiling / (slow - fast)
            even = f"{calls:8.1f} calls, {scores * calls / REPLICATES:.2g} scores"
            print(f"{name:12} {heads:3} heads, N {n:6}: {1e3 * fast:9.3f} ms, tensors {1e3 * slow:9.3f} ms; {even}", flush=True)
    print(f"{name:12} compiled in {compiling:.2f} s", flush=True)


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    torch.rand(64, 64, device="cuda") @ torch.rand(64, 64, device="cuda")  # the library is loaded by its first product
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # before the first kernel is compiled
        for name in POLICIES:
            measure(name)


if __name__ == "__main__":
    main()
