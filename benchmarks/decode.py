"""One query per sequence, or a few: our kernels against SDPA's, side by side on one GPU.

    python -m benchmarks.decode [--queries 1 4 16] [--precision e4m3fn] [--quick]

BF16, 32 heads on 8 KV heads, head_dim 128. Memory is the limit, so the figure is the bytes of q, k, v and O over the time
of a call, in GB/s. Each call reads inputs of its own, until all of them are more than the second-level cache holds; timing is
that of `benchmarks/kernels.py`. `unsplit` is what a kernel does that gives each KV head of a sequence to one program; more than
16 queries, of which 4 heads are more than 64 rows, give it each head. The two with `splits of 2048` have the same bits in every
batch and as the last row of a prefill.

In E4M3, q and the cache have 8 bits, and ours are timed beside ours in BF16: the ratio is that of their times.
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
from numdev.arithmetic.formats import E4M3FN
from numdev.attention.mask import Mask
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.triton import Kernel, Triton

HEADS, KV_HEADS, DIM = 32, 8, 128
CACHE = 150e6  # bytes: more than twice the second-level cache of an H200

Inputs = list[tuple[Tensor, Tensor, Tensor]]
Contender = tuple[Callable[[], object], Inputs]  # a call for each of the inputs


def inputs(batch: int, queries: int, keys: int, dtype: torch.dtype) -> Inputs:
    """As many sets of q, k and v as the cache does not hold."""
    shapes = ((batch, HEADS, queries, DIM), (batch, KV_HEADS, keys, DIM), (batch, KV_HEADS, keys, DIM))

    def drawn() -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for shape in shapes)
        return q, k, v

    first = drawn()
    return [first, *(drawn() for _ in range(math.ceil(CACHE / moved(*first)) - 1))]


def moved(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The bytes that a call must move; O has 16 bits."""
    return sum(x.numel() * x.itemsize for x in (q, k, v)) + 2 * q.numel()


def sdpa(backend: SDPBackend, sets: Inputs) -> Contender:
    def run() -> object:
        with sdpa_kernel([backend]):
            return [torch.nn.functional.scaled_dot_product_attention(*each, enable_gqa=True) for each in sets]

    return run, sets


def ours(attend: Triton, sets: Inputs) -> Contender:
    return lambda: [attend(*each, Mask()) for each in sets], sets


def contenders(sets: Inputs, codes: Inputs | None) -> dict[str, Contender]:
    """The second of the first two is compared with the first."""
    if codes is not None:
        narrow = Triton(E4M3FN, kernel=Kernel.HOPPER, promotion=0, softmax=OnlineSoftmax(exp=Exponential.EXP2, p_scale=256.0))
        both = {"numdev bf16": ours(Triton(), sets), "numdev e4m3fn": ours(Triton(E4M3FN), codes)}
        return both | {"hopper e4m3fn": ours(narrow, codes)}
    return {
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, sets),
        "numdev auto": ours(Triton(), sets),
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION, sets),
        "splits of 2048": ours(Triton(split_size=2048), sets),
        "hopper splits of 2048": ours(Triton(kernel=Kernel.HOPPER, split_size=2048), sets),
        "unsplit hopper": ours(Triton(kernel=Kernel.HOPPER), sets),
        "unsplit portable": ours(Triton(kernel=Kernel.PORTABLE, splits=1), sets),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[1], help="of a sequence, without a mask; by default 1")
    parser.add_argument("--precision", choices=("bf16", "e4m3fn"), default="bf16", help="format of q, k and v")
    parser.add_argument("--quick", action="store_true", help="batches 1 and 16 at 1,024 and 16,384 keys only")
    options = parser.parse_args()
    batches, lengths = ((1, 16), (1024, 16384)) if options.quick else ((1, 2, 4, 8, 16), (1024, 4096, 16384, 65536))
    is_narrow = options.precision == "e4m3fn"
    ratio_of, attend = ("e4m3fn/bf16", Triton(E4M3FN)) if is_narrow else ("auto/cudnn", Triton())
    print(environment(), "GB/s")
    ratios = []
    for queries, batch, keys in itertools.product(options.queries, batches, lengths):
        sets = inputs(batch, queries, keys, torch.bfloat16)
        codes = inputs(batch, queries, keys, torch.float8_e4m3fn) if is_narrow else None
        made = contenders(sets, codes)
        spent = seconds({name: run for name, (run, _) in made.items()})
        times = {name: spent[name] / len(own) for name, (_, own) in made.items()}
        rates = "  ".join(f"{name} {moved(*own[0]) / times[name] / 1e9:4.0f}" for name, (_, own) in made.items())
        other, mine, *_ = times.values()
        ratios.append(other / mine)
        kernel = attend(*(codes or sets)[0], Mask()).kernel.removeprefix("numdev ")
        shown = f"queries {queries:2d} batch {batch:2d} keys {keys:5d}"
        print(f"{shown}  {rates}  {ratio_of} {ratios[-1]:.3f}  {kernel}", flush=True)
    print(f"geometric mean of {ratio_of} {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
