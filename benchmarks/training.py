"""A step of training with one attention or another under the same model, as ratios of one run.

    python -m benchmarks.training [--quick] [--profile] [--device cpu]

The text-to-image model (on a GPU the full one: about 10 million parameters, 256 tokens; on a CPU the small one), BF16
under autocast on a GPU and FP32 on a CPU; forward, backward, clipping and AdamW. Contenders take turns, so that all see the same
clocks; a figure is the median of rounds of several steps, and in brackets its speed over that of vanilla attention. `own` is
PyTorch's flash kernel as the model calls it, without interception: what `flash` needs beyond it is the price of interception.
`as trained` is under deterministic algorithms, which a run of training uses; `free` is without. `--profile` lists, without CUDA
graphs, on which operators of torch the time of a step is spent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import profiler
from torch.nn.attention import SDPBackend, sdpa_kernel

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.base import Backward
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.triton import Triton, TritonBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import Unsupported
from numdev.results.environment import environment, resolve_device
from numdev.training.attend import CallCounts, attend
from numdev.training.run import Run, State, deterministic
from numdev.training.rung import Numerics, Rung
from numdev.training.tasks import TextToImage

VANILLA, OWN = "vanilla", "own"
PUBLISHED = "the paper's section II: flash attention makes forward and backward of its text-to-image model 1.14 times as fast"
FACTS = ("device", "processor", "threads", "torch", "cuda", "cudnn")


@dataclass
class Contender:
    """Steps of one model under one attention; None is the model's own call."""

    run: Run
    attention: Backward | None
    device: torch.device
    graphs: bool
    trained: bool

    def __post_init__(self) -> None:
        self.batch = self.run.task.batch_of(0, 0)
        with self._around() as seen:
            self.state = State(self.run, self.device, seen)
            if self.graphs and (why := self.state.capture(self.batch)):
                raise Unsupported("graphs", why)
            self.state.step(0, self.batch)

    def steps(self, count: int) -> None:
        with self._around():
            for _ in range(count):
                self.state.step(0, self.batch)

    @contextmanager
    def _around(self) -> Iterator[CallCounts]:
        with ExitStack() as stack:
            stack.enter_context(deterministic() if self.trained else nullcontext())
            if self.attention is None:
                stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION]))
                yield CallCounts()
            elif self.graphs and hasattr(self, "state"):
                yield CallCounts()  # a replay calls nothing
            else:
                yield stack.enter_context(attend(self.attention))


def attentions(device: torch.device) -> dict[str, Backward | None]:
    if device.type == "cuda":
        sdpa = {"flash": SdpaBackward(Backend.FLASH), "cudnn": SdpaBackward(Backend.CUDNN)}
        return {VANILLA: VanillaBackward(), OWN: None} | sdpa | {"triton": TritonBackward(Triton())}
    tiled = TiledBackward(Tiled(Precision.kernel(FP32)), BackwardPrecision.kernel(FP32), count=False)
    return {VANILLA: VanillaBackward(FP32), OWN: None, "naive": NaiveBackward.eager(FP32), "tiled": tiled}


def seconds(contenders: dict[str, Contender], device: torch.device, rounds: int, steps: int) -> dict[str, float]:
    """Median time of one step of each."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, each in contenders.items():
            each.steps(1)
            wait()
            start = time.perf_counter()
            each.steps(steps)
            wait()
            times[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(values) for name, values in times.items()}


def show(task: TextToImage, device: torch.device, graphs: bool, rounds: int, *, trained: bool) -> None:
    """One line for each contender, those that refuse with their reason."""
    numerics = Numerics.BF16 if device.type == "cuda" else Numerics.FP32
    made: dict[str, Contender] = {}
    title = f"graphs {'on' if graphs else 'off'}, {'as trained' if trained else 'free'}"
    for name, attention in attentions(device).items():
        run = Run(task, Rung(attention or VanillaBackward(Format.parse(numerics.format)), numerics))
        try:
            made[name] = Contender(run, attention, device, graphs, trained)
        except (Unsupported, RuntimeError) as error:
            print(f"{title}: {name} refuses: {str(error).strip().splitlines()[0]}", flush=True)
    found = seconds(made, device, rounds, 10 if device.type == "cuda" else 1)
    for name, value in found.items():
        rate = task.batch / value
        print(f"{title}: {name:8s} {1e3 * value:8.2f} ms {rate:8.0f} pictures/s ({found[VANILLA] / value:.3f})", flush=True)
    for name, other in (("triton", "flash"), ("flash", OWN)):
        if {name, other} <= found.keys():
            print(f"{title}: {name} / {other}: {found[other] / found[name]:.3f} times as fast", flush=True)


def profile(task: TextToImage, device: torch.device) -> None:
    """The operators on which a step spends most, by the time of the device, in five steps of each attention."""
    for name, attention in attentions(device).items():
        numerics = Numerics.BF16 if device.type == "cuda" else Numerics.FP32
        run = Run(task, Rung(attention or VanillaBackward(Format.parse(numerics.format)), numerics))
        try:
            contender = Contender(run, attention, device, graphs=False, trained=True)
        except Unsupported as error:
            print(f"\n{name} refuses: {error}")
            continue
        contender.steps(2)
        with profiler.profile() as seen:
            contender.steps(5)
        by = f"self_{device.type}_time_total"
        table = seen.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=48)
        print(f"\n{name}, five steps\n{table}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and only as trained")
    parser.add_argument("--profile", action="store_true", help="operators of a step by their time, in place of the table")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = resolve_device(options.device)
    gpu = device.type == "cuda"
    task = TextToImage.full() if gpu else replace(TextToImage(), batch=8)
    facts = environment(device)
    print(", ".join(f"{name} {facts[name]}" for name in FACTS if name in facts))
    print(f"{sum(x.numel() for x in task.model(0).parameters()):,} parameters, batch {task.batch}; {PUBLISHED}")
    if options.profile:
        profile(task, device)
        return
    for trained in (True,) if options.quick else (True, False):
        for graphs in (True, False) if gpu else (False,):
            show(task, device, graphs, 3 if options.quick else 8, trained=trained)


if __name__ == "__main__":
    main()
