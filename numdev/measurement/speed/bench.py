"""One measurement of speed: time, memory, model and deviation of a variant on a problem."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from numdev.attention import cost
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.attention.problem import Problem
from numdev.attention.ran import Ran
from numdev.attention.triton import Products
from numdev.attention.vendor import dispatch as vendor
from numdev.cache import LeastRecentlyUsed
from numdev.errors import BadInput, Unsupported
from numdev.measurement.bench import failure, nonfinite
from numdev.measurement.deviation import Deviation, Sample, compare
from numdev.measurement.speed.ceiling import matmul_flops
from numdev.measurement.speed.memory import peak_bytes
from numdev.measurement.speed.timing import Budget, timed
from numdev.measurement.speed.traffic import Traffic
from numdev.memory import available_bytes
from numdev.results.environment import environment, resolve_device
from numdev.results.record import Record, Status, describe, key_of
from numdev.usersource import foreign

DEVIATIONS = ("rmse", "max_difference", "max_u")
_GOLDEN_BYTES = 1 << 30


class SpeedBench:
    """A device on which variants are timed, one at a time; the counterpart of `numdev.Bench`.

    Attributes:
        device: where everything runs.
        budget: how long each variant is timed.
        traffic: what counts the bytes that calls move; None where they are not counted.
    """

    def __init__(
        self,
        device: str = "auto",
        budget: Budget | None = None,
        counters: bool = False,
        tell: Callable[[str], object] = warnings.warn,
    ) -> None:
        """With `counters` the GPU's are read too; `tell` gets a sentence where they cannot be, and the rest is measured.

        Raises:
            BadInput: for a device that is not there, and for counters where nothing could read any.
        """
        self.device = resolve_device(device)
        self.budget = budget or Budget()
        self.traffic = Traffic(self.device, tell) if counters else None
        self._golden = LeastRecentlyUsed(_GOLDEN_BYTES)

    def environment(self) -> dict[str, str]:
        return environment(self.device)

    def key(self, problem: Problem, variant: Any, baseline: Any = None, seeds: int = 1) -> str:
        """The key under which `measure` files its record."""
        return key_of(self.config(problem, variant, baseline, seeds), self.environment())

    def config(self, problem: Problem, variant: Any, baseline: Any = None, seeds: int = 1) -> dict[str, Any]:
        """The canonical configuration of a point.

        Raises:
            BadInput: for a baseline, with which nothing is compared here.
        """
        if baseline is not None:
            mend = "speed is compared between variants, each a point of its own; give baseline=none"
            raise BadInput("baseline", type(baseline).__name__, mend)
        parts = {"problem": problem, "variant": variant, "baseline": None, "seeds": seeds, "timing": self.budget}
        counters = {} if self.traffic is None else {"counters": True}  # a point without them keeps the key that it always had
        return {name: describe(part) for name, part in parts.items()} | counters | foreign(problem, variant)

    def announce(self, points: Iterable[Any]) -> None:
        """The points of a study that will be measured, in this order: those of a chunk are counted together."""
        if self.traffic is not None:
            self.traffic.announce((point.problem, point.variant) for point in points)

    def measure(self, problem: Problem, variant: Any, baseline: Any = None, seeds: int = 1) -> Record:
        """Time a variant. Each of `seeds` replicates has inputs of its own; a row holds its figures.

        They are those of `MEASURED` in `numdev.measurement.speed.columns`, with counters those of `COUNTED`, and the deviation
        from golden of what the first call returned, of one KV head's group of one batch entry.

        Raises:
            BadInput: for a request that cannot be measured at all. Every other failure is a status of the record.
        """
        config = self.config(problem, variant, baseline, seeds)
        key, start = key_of(config, self.environment()), time.perf_counter()
        status, reason, rows, kernel, compared = Status.OK, "", [], "", []
        try:
            self._check_memory(problem, variant)
            for seed in range(seeds):
                row, deviation, kernel = self._replicate(problem, variant, seed)
                rows.append({"seed": seed} | row)
                compared.append({"subject": "variant", "reference": "golden"} | deviation.metrics())
            if reason := nonfinite(compared):
                status = Status.NONFINITE
        except Unsupported as error:
            status, reason, rows = Status.UNSUPPORTED, str(error), []
        except BadInput:
            raise
        except Exception as error:
            status, reason = failure(error)
            rows = []
        finally:
            vendor.forget_masks()  # they may be as large as the scores, and the next point has another
        if rows and self.traffic is not None:  # last, since a call is counted without proof of which kernel it runs
            counted = self.traffic.of(problem, variant)
            rows = [row | counted for row in rows]
        seconds = time.perf_counter() - start
        return Record(key, config, self.environment(), status, reason, rows, [], seconds, kernel)

    def _replicate(self, problem: Problem, variant: Any, seed: int) -> tuple[dict[str, Any], Deviation, str]:
        inputs = prepared(problem, variant, seed, self.device)
        run = bound(problem, variant, inputs)
        first = run()
        ran = first.ran
        deviation = self._deviation(problem, variant, seed, first)
        output_bytes = sum(map(_bytes, first.tensors().values()))
        del first
        peak = peak_bytes(run, self.device)
        timing = timed(run, self.device, self.budget)
        figures = {
            "latency": timing.latency,
            "latency_low": timing.low,
            "latency_high": timing.high,
            "host": timing.host,
            "host_hidden": timing.hidden,
            "calls": timing.calls,
            "operations": cost.operations(problem),
            "matmul_flops": matmul_flops(inputs[0].dtype, self.device, _is_tf32(variant)),
            "peak_bytes": peak,
            "input_bytes": sum(map(_bytes, inputs)),
            "output_bytes": output_bytes,
        }
        found = {name: deviation.metrics()[name] for name in DEVIATIONS}
        return figures | self._model(problem, variant, ran) | found, deviation, str(ran)

    def _model(self, problem: Problem, variant: Any, ran: Ran) -> dict[str, Any]:
        model = variant.cost_model(ran)
        if model is None:
            return {"algorithm": "", "model_bytes": math.nan, "model_br": 0}
        found = cost.cost_of(problem, model, self.device)
        return {"algorithm": found.algorithm.value, "model_bytes": found.bytes, "model_br": found.br}

    def _deviation(self, problem: Problem, variant: Any, seed: int, output: Any) -> Deviation:
        """Of the result that is timed, in the heads that golden has: all others see the same numbers."""
        small = one_group(problem)
        golden = self._golden.get((small, seed), lambda: self._exact(small, seed))
        return compare(Sample(output.out[:1, : small.shape.heads]), golden, variant.formats["out"])

    def _exact(self, problem: Problem, seed: int) -> Sample:
        q, k, v = problem.inputs(seed, self.device).values()
        return Sample(Exact()(q, k, v, problem.mask, problem.scale).out)

    def _check_memory(self, problem: Problem, variant: Any) -> None:
        """Raise MemoryError rather than be killed by a system that promises memory which it does not have."""
        shape, size = problem.shape, getattr(variant, "storage", torch.float32).itemsize
        wanted = size * (2 * math.prod(shape.q) + 2 * math.prod(shape.kv))
        model = variant.cost_model(Ran())
        if model is not None and model.holds_scores:
            wanted += 2 * int(model.width.input) * shape.batch * shape.heads * shape.queries * shape.keys
        if wanted > (free := available_bytes(self.device)):
            raise MemoryError(f"about {wanted / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free")


def _is_tf32(variant: Any) -> bool:
    return getattr(variant, "products", Products.IEEE) is Products.TF32


def one_group(problem: Problem) -> Problem:
    """The problem of the first batch entry and the query heads that share one KV head."""
    shape, mask = problem.shape, problem.mask
    lengths = None if mask.key_lengths is None else mask.key_lengths[:1]
    small = replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1)
    return replace(problem, shape=small, mask=Mask(mask.causal, mask.window, lengths))


def prepared(problem: Problem, variant: Any, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Inputs as the variant holds them, so that a call converts nothing.

    One group of heads is drawn and repeated: what is timed does not depend on the numbers, but for the power that their
    bits take, and to draw all of them would take longer than to time them.
    """
    shape = problem.shape
    q, k, v = variant.round_inputs(*one_group(problem).inputs(seed, device).values())
    dtype = getattr(variant, "storage", q.dtype)
    repeat: Callable[[Tensor], Tensor] = lambda t: t.to(dtype).repeat(shape.batch, shape.kv_heads, 1, 1)  # noqa: E731
    return repeat(q), repeat(k), repeat(v)


def bound(problem: Problem, variant: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """The call that is measured: of the variant's work alone, where it does some for its caller's sake."""
    call, arguments = getattr(variant, "bare", variant), problem.arguments()
    return lambda: call(*inputs, **arguments)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
