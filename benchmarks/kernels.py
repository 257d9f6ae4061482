"""Our forward kernels beside those of SDPA and, where it is installed, FlashAttention-4, on one GPU.

    python -m benchmarks.kernels [--lengths 1024 4096] [--dims 64 128] [--only "sdpa cudnn" fa4] [--precision fp16] [--pause 0.06]

It takes BF16 or FP16, 16,384 tokens in all, or one sequence where N is larger, 2048/d heads and random inputs; at d = 128 and N
of 16,384 or more also 64 heads on 8 of k and v. FlashAttention-4 gets them in its own layout, tokens before heads.

With `--precision e4m3fn` it times the Hopper kernel in FP8 beside that in BF16: with sums promoted after every tile of keys (not
at d = 256), or never; and with scales, from BF16, of a head, of blocks, and of blocks after a rotation. One line for each: the
kernel with what runs before it (quantiser, or the layout of k and v), and alone. Where nvidia-cudnn-frontend is installed, also
cuDNN's kernel, which gets codes and, on Hopper, leaves O in E4M3.

Every kernel is captured in a CUDA graph of four launches, of one beyond N = 16,384, and the graphs are replayed in turn, twelve
rounds, so that all of them see about the same clocks: a GPU under load lowers them by a tenth. `--only` leaves out slow kernels,
after which the next one would begin on a cooler GPU. The figure is the median over rounds, without the host's share. With
`--pause 0.06` each measurement begins after so many seconds in which the GPU cools, and its power limit does not hold it back;
the figure then has the start of the graph in it, some microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from numdev import Cast
from numdev.arithmetic.formats import E4M3FN, Format, format_of
from numdev.arithmetic.quantise import Quantised, Scale
from numdev.attention.kernels.launch import device_of
from numdev.attention.mask import Mask
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.triton import Kernel, Triton
from numdev.attention.vendor.flash_attn import FlashAttn

TOKENS, WIDTH, ROUNDS, CALLS = 16384, 2048, 12, 4
LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
"""The defaults of `--lengths`, of 16 bits."""
DIMS = [64, 128, 256]
Call = Callable[[], object]


def contenders(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, threshold: float = 0.0) -> dict[str, Call]:
    mask, softmax = Mask(causal=causal), OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=threshold)
    fmt, is_grouped = format_of(q.dtype), q.shape[1] != k.shape[1]

    def sdpa(backend: SDPBackend) -> Call:
        def run() -> object:
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=is_grouped)

        return run

    fa4 = FlashAttn(fmt=fmt)
    own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    return {
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "numdev hopper": lambda: Triton(fmt, kernel=Kernel.HOPPER, softmax=softmax)(q, k, v, mask),
        "numdev portable": lambda: Triton(fmt, kernel=Kernel.PORTABLE)(q, k, v, mask),
        **({"fa4": lambda: fa4(*own, mask)} if fa4.digest else {}),
    }


def narrow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> dict[str, Call]:
    """The Hopper kernel in BF16 and in E4M3; of the latter also what runs before it, and the kernel on what that left."""
    mask, softmax = Mask(causal=causal), OnlineSoftmax(exp=Exponential.EXP2, p_scale=256.0)
    fp8 = Triton(E4M3FN, kernel=Kernel.HOPPER, softmax=softmax)
    inputs, codes = (q, k, v), tuple(x.to(torch.float8_e4m3fn) for x in (q, k, v))
    runs: dict[str, Call] = {"bf16": lambda: Triton(kernel=Kernel.HOPPER)(q, k, v, mask)}
    if find_spec("cudnn"):
        runs["cudnn, codes given, output in e4m3fn"] = cudnn_of_eight_bits(*codes, causal=causal)
    low = Cast.parse("e4m3fn:saturate")
    kinds: dict[str, Quantised | None] = {
        "codes given": None,
        "scales of heads": Quantised(low, Scale.HEAD),
        "scales of blocks": Quantised(low, Scale.BLOCK),
        "scales of blocks, rotated": Quantised(low, Scale.BLOCK, hadamard=True),
    }
    for (name, quantise), promotion in itertools.product(kinds.items(), (0,) if q.shape[-1] == 256 else (0, 1)):
        if promotion == 0 and quantise is not None and q.shape[-1] < 256:
            continue
        kernel, own = replace(fp8, promotion=promotion, quantise=quantise), codes if quantise is None else inputs
        title = f"{name}, {'promoted' if promotion else 'never promoted'}"
        stages = kernel.stages(own, mask)
        assert stages is not None, "every call in 8 bits prepares its inputs"
        made = stages[0]()
        runs |= {title: partial(kernel, *own, mask), f"{title}: before": stages[0], f"{title}: alone": partial(stages[1], *made)}
    return runs


def cudnn_of_eight_bits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Call:
    """cuDNN's kernel on E4M3, by its own package, since PyTorch takes none of 8 bits; P in E4M3 with a factor of 256."""
    import cudnn

    kinds, handle = cudnn.data_type, cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle
    )
    numbers = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), 1.0) | {"scale_s": 256.0, "descale_s": 1 / 256}
    inputs = {"q": q, "k": k, "v": v} | {name: torch.full((1, 1, 1, 1), x, device="cuda") for name, x in numbers.items()}
    outputs = [torch.empty_like(q), *(torch.empty(shape, device="cuda") for shape in ((*q.shape[:3], 1), *[(1, 1, 1, 1)] * 2))]

    def kind_of(x: torch.Tensor) -> object:
        return kinds.FLOAT if x.dtype == torch.float32 else kinds.FP8_E4M3

    of_inputs = {
        name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind_of(x))
        for name, x in inputs.items()
    }
    results = graph.sdpa_fp8(**of_inputs, generate_stats=True, attn_scale=q.shape[-1] ** -0.5, use_causal_mask=causal)
    for result, x in zip(results, outputs, strict=True):
        result.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind_of(x))
    graph.build([cudnn.heur_mode.A])
    space = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
    tensors = dict(zip((*of_inputs.values(), *results), (*inputs.values(), *outputs), strict=True))
    tensors = {name: x if x.dtype == torch.float32 else x.view(torch.uint8) for name, x in tensors.items()}

    def run() -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(tensors, space, handle=handle)
        return outputs[0]

    return run


def environment() -> str:
    """The GPU and the versions that the figures depend on."""
    versions = f"torch {torch.__version__} triton {triton.__version__} cudnn {torch.backends.cudnn.version()}"
    peers = [FlashAttn().digest, f"nvidia-cudnn-frontend {version('nvidia-cudnn-frontend')}" if find_spec("cudnn") else ""]
    return " ".join([torch.cuda.get_device_name(), versions, *filter(None, peers)])


def is_hopper() -> bool:
    return torch.cuda.is_available() and device_of(torch.device("cuda")).generation == "sm_90"


def graphed(run: Call, calls: int = CALLS) -> Call:
    """So many launches as one CUDA graph, so that the host's share is not timed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
    return graph.replay


def seconds(runs: dict[str, Call], calls: int = CALLS, pause: float = 0.0) -> dict[str, float]:
    """Median time of one launch of each, all captured before the first is timed."""
    return seconds_of_calls({name: graphed(run, calls) for name, run in runs.items()}, calls, pause=pause)


def seconds_of_calls(runs: dict[str, Call], calls: int = CALLS, rounds: int = ROUNDS, pause: float = 0.0) -> dict[str, float]:
    """Median time of one call of each, after one more or after a pause in seconds; each of `runs` makes `calls`."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if pause:
                torch.cuda.synchronize()
                time.sleep(pause)
            else:
                run()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def calls_of(n: int) -> int:
    """Calls of one measurement: a launch of one sequence of 32,768 tokens takes as long as four of 16,384."""
    return CALLS if n <= TOKENS else 1


def problems(dims: list[int], lengths: list[int]) -> Iterator[tuple[int, int, int, bool, int]]:
    """head_dim, heads, KV heads, whether there is a causal limit, and N, of each row of a table."""
    for dim, causal, n in itertools.product(dims, (False, True), lengths):
        yield dim, WIDTH // dim, WIDTH // dim, causal, n
    if 128 in dims:
        yield from ((128, 64, 8, causal, n) for causal in (False, True) for n in lengths if n >= TOKENS)


def row_of(dim: int, heads: int, kv_heads: int, causal: bool, n: int) -> str:
    return f"d {dim:3d} {'causal' if causal else 'none  '} N {n:5d} heads {heads:2d}/{kv_heads:2d}"


def rows_of_eight_bits(dims: list[int], lengths: list[int], pause: float) -> None:
    for dim, causal, n in itertools.product(dims, (False, True), lengths):
        batch = max(1, TOKENS // n)
        q, k, v = (torch.randn(batch, WIDTH // dim, n, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        times = seconds(narrow(q, k, v, causal=causal), calls_of(n), pause)
        flops = 4 * batch * WIDTH * n**2 * (0.5 if causal else 1.0)
        place = row_of(dim, WIDTH // dim, WIDTH // dim, causal, n)
        for name, value in times.items():
            rate = f"{place}  {name:42s} {flops / value / 1e12:5.0f} TFLOP/s"
            if before := times.get(f"{name}: before"):
                rate += f", {flops / times[f'{name}: alone'] / 1e12:5.0f} alone; before it {1e6 * before:.0f} us"
            if ": " not in name:
                print(rate, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help="N; by default 1,024 to 32,768, in 8 bits 4,096 and 16,384")
    parser.add_argument("--dims", type=int, nargs="+", choices=DIMS, default=DIMS, help="head_dim")
    others = ("sdpa cudnn", "sdpa flash", "numdev portable", "fa4")
    parser.add_argument(
        "--only", nargs="+", choices=others, help="of 16 bits, what is timed beside `numdev hopper`; by default all"
    )
    parser.add_argument("--precision", choices=["bf16", "fp16", "e4m3fn"], default="bf16", help="format of the inputs")
    parser.add_argument("--rescale-threshold", type=float, default=0.0, help="of the Hopper kernel of 16 bits: 8 omits most")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each measurement, in which the GPU cools")
    options = parser.parse_args()
    if options.precision == "e4m3fn" and (options.only or options.rescale_threshold):
        parser.error("--only and --rescale-threshold are of 16 bits; leave them out, or give --precision bf16")
    if "fa4" in (options.only or ()) and not FlashAttn().digest:
        parser.error(f"fa4 needs its package: {FlashAttn().missing}")
    if not is_hopper():
        parser.error("the Hopper kernel needs a GPU of compute capability 9.0")
    print(environment(), "TFLOP/s", flush=True)
    if options.precision == "e4m3fn":
        rows_of_eight_bits(options.dims, options.lengths or [4096, 16384], options.pause)
        return
    ratios: dict[tuple[str, str], list[float]] = {}
    for dim, heads, kv_heads, causal, n in problems(options.dims, options.lengths or LENGTHS):
        batch, kind = max(1, TOKENS // n), f"d {dim}" if heads == kv_heads else f"{heads} heads on {kv_heads}"
        shapes, dtype = [(batch, each, n, dim) for each in (heads, kv_heads, kv_heads)], Format.parse(options.precision).dtype
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
        runs = contenders(q, k, v, causal=causal, threshold=options.rescale_threshold)
        chosen = {name: run for name, run in runs.items() if name in ("numdev hopper", *(options.only or others))}
        times = seconds(chosen, calls_of(n), options.pause)
        flops = 4 * batch * heads * n * n * dim * (0.5 if causal else 1.0)
        over = {name: value / times["numdev hopper"] for name, value in times.items() if name in ("sdpa cudnn", "fa4")}
        rates = "  ".join(f"{name} {flops / value / 1e12:4.0f}" for name, value in times.items())
        beside = "  ".join(f"hopper/{name} {ratio:.3f}" for name, ratio in over.items())
        print(f"{row_of(dim, heads, kv_heads, causal, n)}  {rates}  {beside}", flush=True)
        for group, (name, ratio) in itertools.product((kind, "all"), over.items()):
            ratios.setdefault((name, group), []).append(ratio)
    for (name, group), values in ratios.items():
        mean = math.exp(statistics.mean(map(math.log, values)))
        print(f"hopper/{name}, {group}: geometric mean {mean:.3f}, least {min(values):.3f}")


if __name__ == "__main__":
    main()
