"""One query per sequence, or a few: our kernels against SDPA's, side by side on one GPU.

    python -m benchmarks.decode [--queries 1 4 16] [--quick]

BF16, 32 heads on 8 KV heads, head_dim 128. Memory is the limit, so the figure is the bytes of q, k, v and O over the time
of a call, in GB/s. Each call reads inputs of its own, until all of them are more than the second-level cache holds; timing is
that of `benchmarks/kernels.py`. `unsplit` is what a kernel does that gives each KV head of a sequence to one program; more than
16 queries, of which 4 heads are more than 64 rows, give it each head. The two with `splits of 2048` have the same bits in every
batch and as the last row of a prefill.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import environment, seconds
from numdev.attention.mask import Mask
from numdev.attention.triton import Kernel, Triton

HEADS, KV_HEADS, DIM = 32, 8, 128
CACHE = 150e6  # bytes: more than twice the second-level cache of an H200

Inputs = list[tuple[Tensor, Tensor, Tensor]]


def inputs(batch: int, queries: int, keys: int) -> tuple[Inputs, int]:
    """Sets of q, k and v, and the bytes that a call on one of them must move."""
    size = 2 * batch * DIM * (2 * HEADS * queries + 2 * KV_HEADS * keys)
    sets = []
    for _ in range(max(1, math.ceil(CACHE / size))):
        shapes = ((batch, HEADS, queries, DIM), (batch, KV_HEADS, keys, DIM), (batch, KV_HEADS, keys, DIM))
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        sets.append((q, k, v))
    return sets, size


def contenders(sets: Inputs) -> dict[str, Callable[[], object]]:
    def sdpa(backend: SDPBackend) -> Callable[[], object]:
        def run() -> object:
            with sdpa_kernel([backend]):
                return [torch.nn.functional.scaled_dot_product_attention(*each, enable_gqa=True) for each in sets]

        return run

    def ours(attend: Triton) -> Callable[[], object]:
        return lambda: [attend(*each, Mask()) for each in sets]

    return {
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "numdev auto": ours(Triton()),
        "splits of 2048": ours(Triton(split_size=2048)),
        "hopper splits of 2048": ours(Triton(kernel=Kernel.HOPPER, split_size=2048)),
        "unsplit hopper": ours(Triton(kernel=Kernel.HOPPER)),
        "unsplit portable": ours(Triton(kernel=Kernel.PORTABLE, splits=1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[1], help="of a sequence, without a mask; by default 1")
    parser.add_argument("--quick", action="store_true", help="batches 1 and 16 at 1,024 and 16,384 keys only")
    options = parser.parse_args()
    batches, lengths = ((1, 16), (1024, 16384)) if options.quick else ((1, 2, 4, 8, 16), (1024, 4096, 16384, 65536))
    print(environment(), "GB/s")
    ratios = []
    for queries, batch, keys in itertools.product(options.queries, batches, lengths):
        sets, size = inputs(batch, queries, keys)
        times = {name: value / len(sets) for name, value in seconds(contenders(sets)).items()}
        rates = "  ".join(f"{name} {size / value / 1e9:4.0f}" for name, value in times.items())
        ratios.append(times["sdpa cudnn"] / times["numdev auto"])
        kernel = Triton()(*sets[0], Mask()).kernel.removeprefix("numdev ")
        place = f"queries {queries:2d} batch {batch:2d} keys {keys:5d}"
        print(f"{place}  {rates}  auto/cudnn {ratios[-1]:.3f}  {kernel}", flush=True)
    print(f"geometric mean of auto/cudnn {math.exp(statistics.mean(map(math.log, ratios))):.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
