"""Launch settings of the portable kernel: checks and times every candidate on this GPU, and pins the fastest of each row.

    python -m benchmarks.tune --formats bf16 fp16 --head-dims 64 128 --masks none causal

Rows of the table that are not tuned this time are kept; each says by which command, on which device and with which versions it
was found. Nothing is tuned when attention runs.
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.exact import Exact
from numdev.attention.kernels import launch, portable
from numdev.attention.kernels.launch import Launch, device_of, mask_name
from numdev.attention.mask import Mask
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.attention.triton import Triton
from numdev.measurement.speed import Budget, timed
from numdev.results.record import write_atomically

MASKS = {"none": Mask(), "causal": Mask(causal=True)}
_TOKENS, _WIDTH = 8192, 2048
_BUDGET = Budget(0.1, 12, 50)
_WIDE = (
    *(Launch(64, 32, 4, 3), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3), Launch(64, 64, 8, 2), Launch(64, 128, 4, 2)),
    *(Launch(128, 64, 4, 2), Launch(128, 64, 8, 2), Launch(128, 64, 8, 3), Launch(128, 128, 8, 2)),
)
# FP32 operands take twice the room.
_NARROW = (Launch(32, 32, 4, 2), Launch(64, 32, 4, 2), Launch(64, 32, 8, 2), Launch(64, 64, 4, 2), Launch(128, 32, 8, 2))


def main(arguments: list[str]) -> None:
    parser = ArgumentParser("benchmarks.tune", description="Pins launch settings of the portable Triton kernel on this GPU.")
    parser.add_argument("--formats", nargs="+", type=Format.parse, default=[Format.parse("bf16"), Format.parse("fp16")])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=[*MASKS])
    parser.add_argument("--n", type=int, default=2048, help="tokens of the problem that is timed")
    parser.add_argument("--out", type=Path, default=launch.TABLE, help="file of the table")
    settings = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.tune: tuning needs a CUDA device, and torch finds none here\n")
    origin = {
        "command": shlex.join(["python", "-m", "benchmarks.tune", *arguments]),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": launch.triton_version()},
    }
    entries = launch.read(settings.out)["entries"] if settings.out.is_file() else []
    rows = [(fmt, d, name) for fmt in settings.formats for d in settings.head_dims for name in settings.masks]
    for fmt, head_dim, mask in rows:
        entry = tune(fmt, head_dim, MASKS[mask], settings.n) | origin
        entries = [old for old in entries if _place(old) != _place(entry)] + [entry]
        # After every row: an interrupted run loses one.
        write_atomically(settings.out, (json.dumps({"entries": entries}, indent=2) + "\n").encode())
    print(f"{len(rows)} rows in {settings.out}")


def _place(entry: dict[str, Any]) -> list[Any]:
    return [entry[name] for name in ("format", "head_dim", "mask", "generation")]


def tune(fmt: Format, head_dim: int, mask: Mask, n: int) -> dict[str, Any]:
    """The entry of the fastest candidate that can be launched and is right."""
    device, seconds, failed = torch.device("cuda"), dict[Launch, float](), {"wrong": 0, "not launched": 0}
    for candidate in _NARROW if fmt == FP32 else _WIDE:
        own = Candidate(Triton(fmt), candidate, head_dim, mask, device)
        try:
            if own.is_right():
                seconds[candidate] = own.seconds(n)
            else:
                failed["wrong"] += 1
        except Exception:  # of the compiler or the driver: too much shared memory, too many registers
            failed["not launched"] += 1
    if not seconds:
        sys.exit(f"no candidate works for {fmt}, head_dim {head_dim}: {failed}")
    place = {"format": fmt.name, "head_dim": head_dim, "mask": mask_name(mask), "generation": device_of(device).generation}
    entry = place | vars(min(seconds, key=seconds.__getitem__))
    print(" ".join(f"{key}={value}" for key, value in entry.items()), f"(candidates: {failed})")
    return entry


@dataclass(frozen=True)
class Candidate:
    """A launch of a kernel."""

    attend: Triton
    launch: Launch
    head_dim: int
    mask: Mask
    device: torch.device

    def is_right(self) -> bool:
        """Whether the error is at most four times, in norm, that of the emulation with the same tile.

        Both round in the same places. What is left is FP32's: other orders of its sums, and an exponential within 2 ulp on a GPU
        (CUDA C++ programming guide, intrinsic functions) where torch's is within half of one or little more.
        """
        q, k, v = self._inputs(2, 200)
        golden, tiled = Exact(), Tiled(self.attend.precision, self._tiling, self.attend.softmax, count=False)
        exact, emulated = (attention(q, k, v, self.mask).out.double() for attention in (golden, tiled))
        return bool((self._call(q, k, v)().double() - exact).norm() <= 4 * (emulated - exact).norm())

    def seconds(self, n: int) -> float:
        """Of one launch."""
        inputs = self._inputs(_WIDTH // self.head_dim * max(1, _TOKENS // n), n)
        return timed(self._call(*inputs), self.device, _BUDGET).latency

    @property
    def _tiling(self) -> Tiling:
        return Tiling(self.launch.br, self.launch.bc)

    def _inputs(self, heads: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        drawn = (torch.randn(1, heads, n, self.head_dim, device=self.device, dtype=torch.float64) for _ in range(3))
        q, k, v = (x.to(self.attend.storage) for x in self.attend.round_inputs(*drawn))
        return q, k, v

    def _call(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        warps, stages = self.launch.warps, self.launch.stages
        request = portable.Request(self.attend.precision, self._tiling, self.attend.softmax, warps=warps, stages=stages)
        plan = portable.plan(request, q, k, v, self.mask, self.head_dim**-0.5)
        return lambda: plan.run(q, k, v)[0]


if __name__ == "__main__":
    main(sys.argv[1:])
