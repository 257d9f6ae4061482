"""Backward kernels against those of SDPA and FlashAttention-4, side by side on one GPU.

    python -m benchmarks.backward [--lengths 4096] [--dims 64 128] [--only fa4 fa4_det] [--precision fp16] [--parts] [--tiles]

It takes BF16 or FP16, and problems as in `benchmarks/kernels.py`. Contenders take turns, so that all of them see the same clocks;
ours are CUDA graphs, the others calls of autograd, four to a measurement, or one beyond N = 16,384. FlashAttention-4, where it is
installed, gets its own layout, tokens before heads, and adds to dQ in any order or, as `fa4_det`, in one.

A figure is the median of twelve, in TFLOP/s of `10 N^2 d` operations for each head, half of that under a causal limit; what an
implementation computes twice is counted once. In brackets is the ratio to cuDNN's figure. Ours are the portable kernels and, on
a Hopper GPU, `fused`, those for it: one up to d = 128, three at d = 256. Each is checked against FP64 autograd in the same run.
`--parts` times the portable kernels one by one; `--tiles` tries launches for each of them, and says which is the fastest.
`--only` leaves out slow passes, after which the next one would begin on a cooler GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import (
    DIMS,
    LENGTHS,
    TOKENS,
    Call,
    calls_of,
    environment,
    graphed,
    is_hopper,
    problems,
    row_of,
    seconds_of_calls,
)
from numdev.arithmetic.formats import BF16, Format, format_of
from numdev.attention.base import Saved
from numdev.attention.kernels import portable
from numdev.attention.kernels.launch import Kernel, Launch, Launches
from numdev.attention.mask import Mask
from numdev.attention.triton import Triton, TritonBackward
from numdev.attention.vendor.flash_attn import FlashAttn
from numdev.errors import Unsupported

ROUNDINGS = 3  # on the way to a gradient: O in delta, P or dS, and the output
OURS = {"portable": Kernel.PORTABLE, "fused": Kernel.HOPPER}
TILES = {
    "keys": [(br, bc, w, s) for br, bc, w in ((64, 128, 8), (32, 128, 8), (64, 64, 4)) for s in (1, 2, 3)],
    "rows": [(br, bc, w, s) for br, bc, w in ((128, 64, 8), (128, 128, 8), (64, 64, 4)) for s in (2, 3)],
}


@dataclass(frozen=True)
class Problem:
    """Inputs of one row of the table, and what a forward pass saved."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    saved: Saved
    mask: Mask

    @staticmethod
    def of(dim: int, heads: int, kv_heads: int, causal: bool, n: int, fmt: Format = BF16) -> Problem:
        generator, batch = torch.Generator("cuda").manual_seed(0), max(1, TOKENS // n)
        shapes = [(batch, each, n, dim) for each in (heads, kv_heads, kv_heads, heads)]
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=fmt.dtype, generator=generator) for shape in shapes)
        mask = Mask(causal=causal)
        output = Triton(fmt)(q, k, v, mask)
        assert output.lse is not None
        return Problem((q, k, v, do), Saved(output.out, output.lse), mask)

    @property
    def operations(self) -> float:
        batch, heads, n, dim = self.inputs[0].shape
        return 10 * batch * heads * n * n * dim * (0.5 if self.mask.causal else 1.0)

    @property
    def fmt(self) -> Format:
        return format_of(self.inputs[0].dtype)

    def runs(self, kernel: Kernel) -> TritonBackward:
        return TritonBackward(Triton(self.fmt), self.fmt, kernel=kernel)

    def ours(self, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        gradients = self.runs(kernel).backward(*self.inputs, self.saved, self.mask)
        return gradients.dq, gradients.dk, gradients.dv

    def sdpa(self, backend: SDPBackend) -> Callable[[], tuple[Tensor, ...]]:
        leaves = q, k, v = tuple(x.detach().clone().requires_grad_() for x in self.inputs[:3])
        with sdpa_kernel([backend]):
            is_grouped = q.shape[1] != k.shape[1]
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.mask.causal, enable_gqa=is_grouped)
        return lambda: torch.autograd.grad(out, leaves, self.inputs[3], retain_graph=True)

    def fa4(self, deterministic: bool) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in self.inputs[:3]]
        do = self.inputs[3].transpose(1, 2).contiguous()
        function = FlashAttn(fmt=self.fmt).function("flash_attn_func", do.device)
        result = function(*leaves, causal=self.mask.causal, deterministic=deterministic)
        out = result[0] if isinstance(result, tuple) else result
        return lambda: tuple(x.transpose(1, 2) for x in torch.autograd.grad(out, leaves, do, retain_graph=True))

    @cached_property
    def golden(self) -> list[Tensor]:
        """dQ of the last head, and dK and dV of the last head of k and v, by FP64 autograd of one head after the other."""
        q, k, v, do = (x[-1] for x in self.inputs)
        group, total = len(q) // len(k), [0 * k[-1].double(), 0 * v[-1].double()]
        for head in range(len(q) - group, len(q)):
            leaves = [x.double().requires_grad_() for x in (q[head], k[-1], v[-1])]
            scores = leaves[0] @ leaves[1].T * leaves[0].shape[-1] ** -0.5
            if self.mask.causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
            dq, *others = torch.autograd.grad(scores.softmax(-1) @ leaves[2], leaves, do[head].double())
            total = [x + y for x, y in zip(total, others, strict=True)]
        return [dq, *total]

    def errors(self, gradients: tuple[Tensor, ...]) -> list[float]:
        """Relative errors (Frobenius) of `golden`."""
        return [
            float((mine[-1, -1].double() - exact).norm() / exact.norm())
            for mine, exact in zip(gradients, self.golden, strict=True)
        ]

    def parts(self, launches: Launches) -> dict[str, Call]:
        """Each of our kernels alone."""
        runs = self.runs(Kernel.PORTABLE)
        request = portable.BackwardRequest(runs.precision, runs.recompute, launches)
        inputs = portable.Inputs(*self.inputs, self.saved.out, self.saved.lse)
        plan = portable.BackwardPlan(request, inputs, self.mask, inputs.q.shape[-1] ** -0.5)
        memory, kernels = plan.memory(), {"prepare": plan.prepare, "dk_dv": plan.dk_dv, "dq": plan.dq}
        return {name: partial(kernel, inputs, memory) for name, kernel in kernels.items()}


def repeated(run: Call, calls: int) -> Call:
    """A function that calls `run` so many times."""

    def all_calls() -> None:
        for _ in range(calls):
            run()

    return all_calls


def row(problem: Problem, label: str, only: list[str] | None) -> dict[str, float]:
    """One line of the table, with cuDNN, the fused pass and those of `only`, or all; TFLOP/s by name."""
    others = {"cudnn": problem.sdpa(SDPBackend.CUDNN_ATTENTION), "flash": problem.sdpa(SDPBackend.FLASH_ATTENTION)}
    if FlashAttn().digest:
        others |= {"fa4": problem.fa4(False), "fa4_det": problem.fa4(True)}
    ours = {name: partial(problem.ours, kernel) for name, kernel in OURS.items() if name == "portable" or is_hopper()}
    kept = {"cudnn", "fused", *(only or (others | ours))}
    others, ours = ({name: run for name, run in each.items() if name in kept} for each in (others, ours))
    calls = calls_of(problem.inputs[0].shape[2])
    runs = {name: repeated(run, calls) for name, run in others.items()}
    runs |= {name: graphed(run, calls) for name, run in ours.items()}
    rates = {name: problem.operations / value / 1e12 for name, value in seconds_of_calls(runs, calls).items()}
    errors = {name: max(problem.errors(run())) for name, run in (others | ours).items()}
    limit = ROUNDINGS * 2.0 ** -(problem.fmt.precision + 1)
    wrong = "".join(f"  {name} is WRONG" for name in ours if errors[name] > limit)
    table = "  ".join(f"{name} {rate:4.0f} ({rate / rates['cudnn']:.3f})" for name, rate in rates.items())
    print(label, table, f" largest error {max(errors.values()):.1e}{wrong}", flush=True)
    return rates


def show_parts(problem: Problem, label: str) -> None:
    launches = problem.runs(Kernel.PORTABLE).launches(problem.inputs[0].shape[-1], problem.mask, torch.device("cuda"))
    times = seconds_of_calls({name: graphed(run) for name, run in problem.parts(launches).items()})
    share = {"prepare": 0.0, "dk_dv": 0.8, "dq": 0.6}  # of the counted operations: four products of five, three of five
    rates = {name: f"{1e6 * value:.0f} us {share[name] * problem.operations / value / 1e12:.0f}" for name, value in times.items()}
    print(label, "  ".join(f"{name} {text}" for name, text in rates.items()), flush=True)


def try_tiles(problem: Problem, label: str) -> None:
    chosen = problem.runs(Kernel.PORTABLE).launches(problem.inputs[0].shape[-1], problem.mask, torch.device("cuda"))
    for which, part in (("keys", "dk_dv"), ("rows", "dq")):
        times = {}
        for sides in TILES[which]:
            launches = replace(chosen, **{which: Launch(*sides)})
            try:
                times[sides] = seconds_of_calls({"it": graphed(problem.parts(launches)[part])}, rounds=3)["it"]
            except (Unsupported, RuntimeError):  # it does not fit into shared memory, or does not compile
                continue
        best = sorted(times, key=times.__getitem__)[:4]
        print(label, part, "  ".join(f"{sides} {1e6 * times[sides]:.0f} us" for sides in best), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="N; by default 1,024 to 32,768")
    parser.add_argument("--dims", type=int, nargs="+", choices=DIMS, default=DIMS, help="head_dim")
    others = ("flash", "fa4", "fa4_det", "portable")
    parser.add_argument("--only", nargs="+", choices=others, help="what is timed beside cudnn and fused; by default all")
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16", help="format of the inputs")
    alone = "time launch settings of the portable kernels, and nothing else"
    for name, text in (("parts", "time each portable kernel besides"), ("tiles", alone)):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = parser.parse_args()
    if options.tiles and (options.only or options.parts):
        parser.error("--tiles times nothing else; leave out --only and --parts")
    if {"fa4", "fa4_det"} & {*(options.only or ())} and not FlashAttn().digest:
        parser.error(f"fa4 and fa4_det need its package: {FlashAttn().missing}")
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    print(environment(), "TFLOP/s")
    rates = []
    for dim, heads, kv_heads, causal, n in problems(options.dims, options.lengths):
        problem = Problem.of(dim, heads, kv_heads, causal, n, Format.parse(options.precision))
        label = row_of(dim, heads, kv_heads, causal, n)
        if options.tiles:
            try_tiles(problem, label)
            continue
        rates.append(row(problem, label, options.only))
        if options.parts:
            show_parts(problem, label)
    for name, other in itertools.product(OURS, ("cudnn", "flash", "fa4", "fa4_det")):
        ratios = [each[name] / each[other] for each in rates if name in each and other in each]
        if ratios:
            mean = math.exp(statistics.mean(map(math.log, ratios)))
            print(f"numdev {name} / {other}: geometric mean {mean:.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
