"""Whether attention caused a loss spike: the steps before it are replayed with exact attention, and with its steps exact in turn.

The body of the user's loop replays itself. What it does need not be known, but all that it changes must be restored: the model,
what `state` lists, and torch's random numbers. Whether that is all is the first question, asked with the attention that the model
ran on. A `HeadLog` sees each call meanwhile, and how far its heads deviate from exact attention.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves

from numdev.arithmetic.formats import FP64, Format, format_of
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Backward, softmax_scale
from numdev.attention.differentiable import uncast
from numdev.attention.emulation import gradients_emulation_of
from numdev.attention.exact import ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput
from numdev.measurement.metrics import largest_singular
from numdev.results.record import WINDOW, spike_limit, write_atomically
from numdev.results.store import pack
from numdev.training.attend import Arguments, Call, ForwardAlone, Onward, Variant, trainable
from numdev.training.recorders import Recorder
from numdev.training.run import moved, refused
from numdev.training.watch import ExactCall

_AFTER = 5  # steps that follow a spike, and steps before it from which on a replay may spike
_SHOWN = 5  # heads
_REPEATS = 1e-3  # how far the first loss of a replay may be from the run's, relative to it: sums on a GPU vary in their order
RUN, AGAIN, NUDGED = "the run", "the same attention", "the same attention, one weight moved by a last place"
EXACT, ALONE, EMULATED = "exact attention", "exact attention in the head that errs most", "tiled emulation of the attention"
STEP = "one step exact: "
Item = TypeVar("Item")
FIGURES = {
    "largest_logit": ("", "largest |scale q k|, in the format of S"),
    "logit_std": ("", "standard deviation of the scores that are seen"),
    "saturated": ("", "share of rows whose largest exact P rounds to 1 in the format of O"),
    "tied": ("", "share of rows whose largest score occurs more than once, in the format of S"),
    "out_size": ("absolute", "root mean square of exact O"),
    "out_rmse": ("absolute", "root mean square of O - exact O"),
    "out_rank": ("", "stable rank of O - exact O, the mean over the batch; NaN where one has no error"),
    "dq_size": ("absolute", "root mean square of exact dQ; NaN where no gradient came"),
    "dq_rmse": ("absolute", "root mean square of dQ - exact dQ"),
    "dq_rank": ("", "stable rank of dQ - exact dQ, the mean over the batch"),
}
"""Unit and meaning of what is kept of a head in a step; exact is FP64 of the same q, k, v and dO."""
_AT_ONCE = 1 << 25  # scores, 256 MB in FP64
Place = tuple[str, int, int]  # layer, number of the call in its step, head
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Replay:
    """The losses of the replayed steps under one attention, or of the run itself."""

    title: str
    losses: tuple[float, ...]
    peak: float  # the largest loss around the spike, infinite where one is not finite
    spikes: bool


@dataclass(frozen=True)
class Diagnosis:
    """What the replays showed: `verdict` is `no spike`, `not attention`, `attention` or `undecided`; `sentence` says it."""

    verdict: str
    sentence: str
    spike: int | None = None  # the step
    first: int = 0  # the step that replays start from
    limit: float = math.nan  # above which a replay spikes
    replays: tuple[Replay, ...] = ()  # the run itself first
    heads: tuple[Row, ...] = ()  # those that err most, see `worst_heads`

    def json(self) -> bytes:
        """The file `diagnosis.json`; a number that is not finite is null."""
        finite = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return json.dumps(finite, indent=1, ensure_ascii=False).encode() + b"\n"


class doctor(Generic[Item]):  # noqa: N801  # used as `shadow` and `capture` are
    """The batches of a training loop, whose losses are watched; after a spike its steps are replayed to find the cause.

        >>> batches = nd.doctor(model, batches, steps=1000, state=[optimizer, scheduler])
        >>> for batch in batches:
        ...     loss = train(batch)
        ...     batches.note(loss)
        >>> print(batches.diagnosis.sentence)

    The loss spikes where it is not finite, or lies more than 7 standard deviations above the median of the 40 before it (by the
    median absolute deviation). Five steps later the loop gets the batches since the last checkpoint but one again: with the same
    attention; so with one weight moved by a last place; and with exact attention. If exact attention alone removes the spike, it
    gets them with exact attention in the head that errs most; with tiled emulation of the attention; with each pass of it exact;
    and with each step exact in turn, of a pass that removes the spike. Then the loop ends, and the model is as the run left it.

    Each process writes into a folder of its own, `rank<number>`: checkpoints, `diagnosis.json`, and `log-<step>.parquet`, a row
    for each step, layer and head that was looked at, with the loss, the norm of the gradients and
    `numdev.training.doctor.FIGURES`. A killed run goes on from the last checkpoint but one, if the same batches are given again.
    Under `torch.distributed` the loss is the mean over processes, so that all replay together; rank 0 says which head errs most.

    Attributes:
        step: the number of the step whose batch the loop has got.
        replay: what it is replayed with, or empty in the run itself.
        diagnosis: what was found, when the loop has ended.

    Args:
        model: is saved with its gradients, and restored for each replay.
        batches: what the loop takes, a copy of each.
        steps: how many, or their numbers as a range; fewer where the batches end.
        state: whatever else a step changes and has `state_dict`, such as the optimizer, its scheduler, a loss scaler.
        attention: what the model runs on, as in `attend`; None is the attention that it calls, taken for a kernel in tiles of 64.
        folder: where files are written.
        every: looks at attention in every so many steps.
        heads: at so many KV heads of each layer in turn; None is all.
        checkpoint: steps from one checkpoint to the next.

    Raises:
        BadInput: for a number below 1, for state without `state_dict`; in the loop, for a folder that holds a diagnosis or
            another run, and for a step without its loss.
        Unsupported: in the loop, for a model that never calls torch's `scaled_dot_product_attention`, and as `attend` does.
        StoreError: in the loop, where a file cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Item],
        *,
        steps: int | range,
        state: Iterable[Any] | Any = (),
        attention: Variant | None = None,
        folder: Path | str = "doctor",
        every: int = 10,
        heads: int | None = 1,
        checkpoint: int = 50,
    ) -> None:
        count = len(steps) if isinstance(steps, range) else steps
        for name, value in {"steps": count, "every": every, "heads": heads, "checkpoint": checkpoint}.items():
            if not (isinstance(value, int) and value > 0) and (name, value) != ("heads", None):
                raise BadInput(name, value, "give a whole number of at least 1")
        self._steps, self._interval = steps if isinstance(steps, range) else range(steps), checkpoint
        self._model, self._batches, self._attention = model, batches, attention
        self._parts = model, *([state] if hasattr(state, "state_dict") else state)
        self._run = [self._steps.start, checkpoint, repr(attention) if is_dataclass(attention) else type(attention).__name__]
        for part in self._parts:
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise BadInput("state", type(part).__name__, "give what has state_dict and load_state_dict, such as an optimizer")
        self._is_parallel = distributed.is_available() and distributed.is_initialized()
        self.folder = Path(folder) / f"rank{distributed.get_rank() if self._is_parallel else 0}"
        self._log = HeadLog(model, attention, every, heads)
        self._held: list[tuple[int, Item]] = []  # the batches since the first checkpoint that is kept
        self._losses: dict[int, float] = {}
        self._current = self._log  # of the replay or of the run
        self._noted: tuple[float, bool] | None = None
        self.step, self.replay = self._steps.start, ""
        self._spike, self._limit, self._replays = -1, math.inf, list[Replay]()
        self._diagnosis: Diagnosis | None = None

    @property
    def diagnosis(self) -> Diagnosis:
        """Raises BadInput before the loop has ended by itself."""
        if self._diagnosis is None:
            raise BadInput("diagnosis", None, "there is none before the loop over the batches has ended")
        return self._diagnosis

    def note(self, loss: Tensor | float, *, spike: bool = False) -> None:
        """The loss of a step, after its gradients; `spike` asks for replays although the loss may not spike. Waits for it."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise BadInput("loss", tuple(loss.shape), "give one number")
        place = next(self._model.parameters()).device
        grads = [x.grad for x in self._model.parameters() if self._current.looks_now and x.grad is not None]  # rows hold the norm
        values = loss, nn.utils.get_total_norm(grads) if grads else math.nan, spike
        noted = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=place).detach().reshape(()) for x in values])
        if self._is_parallel:
            distributed.all_reduce(noted)
            noted /= distributed.get_world_size()
        value, norm, asked = noted.tolist()
        self._current.of_step[self.step] = {"loss": value, "gradient_norm": norm}
        self._noted = value, asked > 0

    def __iter__(self) -> Iterator[Item]:
        if (self.folder / "diagnosis.json").exists():
            raise refused(self.folder, "it holds a diagnosis, which numdev doctor shows")
        yield from self._train()
        if self._spike < 0:
            first, last = min(self._losses), max(self._losses)
            about = f"of the first {WINDOW} steps only a loss that is not finite counts"
            sentence = f"No loss is infinite or NaN in steps {first} to {last}: {about}."
            if later := [*self._losses.values()][WINDOW:]:
                sentence = f"No spike in steps {first + WINDOW} to {last}: the largest loss is {max(later):.3g}; {about}."
            self._diagnosis = Diagnosis("no spike", sentence)
        else:
            left = self._saved()
            self._diagnosis = yield from self._examine()
            self._restore(left)
        write_atomically(self.folder / "diagnosis.json", self._diagnosis.json())

    def _train(self) -> Iterator[Item]:
        """The run itself, up to some steps after a spike."""
        start, end = self._resumed(), self._steps.stop
        for number, batch in zip(self._steps, self._batches, strict=False):
            if number >= end:
                break
            if number < start:
                continue
            if number == start:  # after the batches before it, for which a shuffle may draw from torch's generator
                saved = self._restore(self._checkpoints()[number].read_bytes())
                if saved["batch"] != digest_of(batch):
                    hint = "its batch is another than that of the run in the folder; give the same batches"
                    raise BadInput("batches", number, hint)
                self._losses = saved["losses"]
            if self._spike < 0 and (number - self._steps.start) % self._interval == 0:
                self._keep(number, batch)
            self._held.append((number, copy.deepcopy(batch)))
            value, asked = yield from self._step(self._log, number, batch)
            if not self._log.is_idle and not self._log.seen.calls:
                self._log.seen.require()
            limit = spike_limit(list(self._losses.values()))
            self._losses[number] = value
            if self._spike < 0 and (asked or not value <= limit or not math.isfinite(value)):
                self._spike, self._limit, end = number, limit, number + 1 + (_AFTER if math.isfinite(value) else 0)
        if not self._losses:
            raise BadInput("batches", 0, "give some")
        self._write_log()
        if self._log.seen.calls:
            self._log.seen.warn("doctor")

    def _step(self, log: HeadLog, number: int, batch: Item) -> Generator[Item, None, tuple[float, bool]]:
        """One pass through the body of the loop; its loss, and whether replays are asked for."""
        log.step(number)
        self.step, self._current, self._noted = number, log, None
        with nullcontext() if log.is_idle else log.active():
            yield batch
        if self._noted is None:
            raise BadInput("loss", None, "call note(loss) in each step of the loop")
        return self._noted

    def _examine(self) -> Generator[Item, None, Diagnosis]:
        """The replays; what one shows decides which follow."""
        before = [loss for number, loss in self._losses.items() if number < self._spike][-WINDOW:]
        middle, limit = median(before or [math.nan]), self._limit
        run = self._add(RUN, [self._losses[number] for number, _ in self._held])
        self._limit = replay_limit(before, limit, run.peak)
        if run.peak <= self._limit < math.inf:
            sentence = f"No spike at step {self._spike}: the loss, {run.peak:.3g}, is not above those before it."
            return Diagnosis("no spike", sentence, self._spike)
        # A replay without the cause may come a little above the limit of the run too.
        usual = middle + 2 * (limit - middle) if limit < run.peak else math.inf
        log = HeadLog(self._model, self._attention, every=1)
        again = yield from self._replay(AGAIN, log)
        rows = log.rows()
        write_atomically(self.folder / "replay.parquet", pack("replay", rows))
        heads = worst_heads(rows, self._spike)
        nudged = yield from self._replay(NUDGED, HeadLog(self._model, self._attention), nudged=True)
        best = HeadLog(self._model, ExactBackward())
        exact = yield from self._replay(EXACT, best)
        if again.spikes and nudged.spikes and not exact.spikes:
            place: Place = (heads[0]["layer"], heads[0]["call"], heads[0]["head"])
            yield from self._replay(ALONE, HeadLog(self._model, self._attention, exact=self._gathered(place)[0]))
            yield from self._examine_steps(self._emulation(log))
        first, replays = self._held[0][0], (replace(run, spikes=True), *self._replays[1:])
        verdict, sentence = judged(replays, first, heads, usual, best.seen.ran())
        spiked = f"The loss is {said(run.peak)} around step {self._spike}, after {middle:.3g}. {sentence}"
        return Diagnosis(verdict, spiked, self._spike, first, self._limit, replays, tuple(heads[:_SHOWN]))

    def _examine_steps(self, kernel: TiledBackward) -> Iterator[Item]:
        """Passes of an emulation made exact, and steps of those that remove the spike."""
        if kernel is not self._attention:
            emulated = yield from self._replay(EMULATED, HeadLog(self._model, kernel))
            if not emulated.spikes:
                return

        policies: dict[str, Any] = {"forward": kernel.forward.precision, "backward": kernel.precision}

        def exact(title: str, **changed: Any) -> Generator[Item, None, Replay]:
            assert isinstance(kernel.forward, Tiled)
            forward, backward = (policies | changed).values()
            attention = replace(kernel, forward=replace(kernel.forward, precision=forward), precision=backward)
            return self._replay(title, HeadLog(self._model, attention))

        for direction, policy in policies.items():
            whole = yield from exact(f"exact {direction} pass", **{direction: policy.golden()})
            for name, text in policy.steps().items() if not whole.spikes else ():
                if (step := policy.with_step(**{name: FP64})) != policy:
                    yield from exact(f"{STEP}{name} of the {direction} pass, else in {text}", **{direction: step})

    def _replay(self, title: str, log: HeadLog, *, nudged: bool = False) -> Generator[Item, None, Replay]:
        """The steps again from the first checkpoint that is kept."""
        self._restore(self._checkpoints()[self._held[0][0]].read_bytes())
        if nudged:
            parameters: dict[str, Tensor] = dict(self._model.named_parameters())
            name, index = moved(parameters)
            weight = parameters[name].detach().view(-1)[index]
            weight.mul_(1 + torch.finfo(weight.dtype).eps)
        losses, self.replay = list[float](), title
        for number, batch in self._held:
            value, _ = yield from self._step(log, number, copy.deepcopy(batch))
            losses.append(value)
        return self._add(title, losses)

    def _add(self, title: str, losses: Sequence[float]) -> Replay:
        around = [loss for (number, _), loss in zip(self._held, losses, strict=True) if number >= self._spike - _AFTER]
        peak = max(around) if all(map(math.isfinite, around)) else math.inf
        self._replays.append(Replay(title, tuple(losses), peak, math.isinf(peak) or peak > self._limit))
        return self._replays[-1]

    def _emulation(self, log: HeadLog) -> TiledBackward:
        """Tiled attention with the formats of what the model runs on, in its tiles where they are known."""
        attention, tiling, (shape, fmt, mask) = self._attention, Tiling(64, 64), log.last
        if isinstance(attention, TiledBackward) and isinstance(attention.forward, Tiled):
            return attention
        forward, backward = Precision.kernel(fmt), BackwardPrecision.kernel(fmt)
        if isinstance(attention, Backward):
            forward, backward = attention.primal.precision, attention.precision
            with suppress(BadInput):
                return gradients_emulation_of(attention, shape, mask)
        return TiledBackward(Tiled(forward, tiling, count=False), backward, tiling, count=False)

    def _keep(self, number: int, batch: Item) -> None:
        """Write what the run looked at and a checkpoint, and keep the batches since the one before."""
        self._write_log()
        data = self._saved(batch)
        self._loaded(data)  # what cannot be read again is refused before it is needed
        write_atomically(self.folder / f"checkpoint-{number:08d}.pt", data)
        checkpoints = self._checkpoints()
        first = sorted(checkpoints)[-2:][0]  # a spike just after one is replayed from the one before
        for old in (path for step, path in checkpoints.items() if step < first):
            old.unlink()
        self._held = [(step, batch) for step, batch in self._held if step >= first]

    def _write_log(self) -> None:
        if rows := self._log.rows():
            write_atomically(self.folder / f"log-{rows[0]['step']:08d}.parquet", pack("log", rows))

    def _checkpoints(self) -> dict[int, Path]:
        return {int(path.stem[-8:]): path for path in self.folder.glob(f"checkpoint-{'[0-9]' * 8}.pt")}

    def _saved(self, batch: Item | None = None) -> bytes:
        """Everything that the next step depends on, and the losses so far."""
        random = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        parts, buffer = [part.state_dict() for part in self._parts], io.BytesIO()
        grads = [x.grad for x in self._model.parameters()]  # of several steps, before the optimizer's next one
        rest = {"random": random, "run": self._run, "losses": self._losses}
        torch.save({"parts": parts, "grads": grads, "batch": digest_of(batch), **rest}, buffer)
        return buffer.getvalue()

    def _restore(self, data: bytes) -> dict[str, Any]:
        """Go back to what was saved."""
        saved = self._loaded(data)
        if saved["run"] != self._run:
            raise refused(self.folder, "it holds a run with other steps, checkpoints or attention")
        try:
            for part, state in zip(self._parts, saved["parts"], strict=True):
                part.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            why = f"its checkpoint does not fit the model or the state ({str(error).splitlines()[0]})"
            raise refused(self.folder, why) from error
        for weight, grad in zip(self._model.parameters(), saved["grads"], strict=True):
            weight.grad = None if grad is None else grad.to(weight.device)
        torch.set_rng_state(saved["random"][0])
        torch.cuda.set_rng_state_all(saved["random"][1:])
        return saved

    def _loaded(self, data: bytes) -> dict[str, Any]:
        try:
            saved: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise refused(self.folder, "a checkpoint is damaged, or state holds more than tensors, numbers and text") from error
        return saved

    def _resumed(self) -> float:
        """The step to go on from: that of the first checkpoint that every process has; NaN if there is none."""
        own = self._checkpoints()
        common = set.intersection(*map(set, self._gathered(set(own))))
        for step in own.keys() - common:
            own[step].unlink()
        if common:
            warnings.warn(f"doctor: goes on from step {min(common)} of {self.folder}", stacklevel=4)
        return float(min(common, default=math.nan))

    def _gathered(self, value: Any) -> list[Any]:
        """The value of each process."""
        values = [value] * (distributed.get_world_size() if self._is_parallel else 1)
        if self._is_parallel:
            distributed.all_gather_object(values, value)
        return values


def digest_of(batch: Any) -> str:
    """The same for batches of the same tensors and numbers."""
    found = hashlib.sha256()
    for leaf in tree_leaves(batch):
        is_tensor = isinstance(leaf, Tensor) and leaf.layout is torch.strided
        held = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if is_tensor else b""
        text = str(tuple(leaf.shape)) if is_tensor else repr(leaf) if isinstance(leaf, (int, float, str)) else type(leaf).__name__
        found.update(text.encode() + held)
    return found.hexdigest()


def replay_limit(before: Sequence[float], limit: float, peak: float) -> float:
    """The loss above which a replay spikes, of the losses before a spike, the limit that it passed, and its peak.

    A replay without the cause may come a little above the limit too. So the height above the median that counts is the geometric
    mean of both heights, at most ten times that of the limit: one that explodes has no height. Where the run did not pass its
    limit, and replays were asked for, it is half the height of the peak; where there was no limit yet, the largest loss before.
    """
    middle = median(before or [math.nan])
    if not limit < peak:
        return (middle + peak) / 2 if math.isfinite(peak) else max(before, default=limit)
    return middle + min(math.sqrt((limit - middle) * (peak - middle)), 10 * (limit - middle))


def worst_heads(rows: Sequence[Row], spike: int) -> list[Row]:
    """For each head the row up to the spike in which it errs most, with its `error`; the head that errs most comes first.

    The error is that of O over its size, or if that is more, of dQ over the root mean square of all dQ of the step: a head that
    has hardly a gradient errs much of its own. It is infinite, and the earliest such row counts, where exact O or dQ is finite
    and that of the attention is not.
    """
    squares, worst = defaultdict[int, list[float]](list), dict[Place, Row]()
    for row in rows:
        squares[row["step"]].append(row["dq_size"] ** 2)
    for row in rows:
        own, place = squares[row["step"]], (row["layer"], row["call"], row["head"])
        pairs = (row["out_rmse"], row["out_size"]), (row["dq_rmse"], math.sqrt(math.fsum(own) / len(own)))
        ratios = (part / size if math.isfinite(part) else math.inf for part, size in pairs if 0 < size < math.inf)
        error = max(ratios, default=0.0)  # 0 for one that is not known
        if row["step"] <= spike and not (place in worst and error <= worst[place]["error"]):
            worst[place] = {**row, "error": error}
    return sorted(worst.values(), key=lambda row: (-row["error"], row["step"]))


def judged(replays: Sequence[Replay], first: int, heads: Sequence[Row], usual: float, missed: str) -> tuple[str, str]:
    """Verdict and sentence; `usual` is the largest loss that is no sign of a spike, `missed` is what was not made exact."""
    run, again, nudged, exact, *rest = replays
    stays = f"with exact attention the loss stays at {said(exact.peak)}, not {said(run.peak)}"
    why = "a step changes something that is not in state, or is not deterministic"
    if not math.isclose(run.losses[0], again.losses[0], rel_tol=_REPEATS):
        return "undecided", f"With {AGAIN} the loss of step {first} is {again.losses[0]:.4g}, not {run.losses[0]:.4g}: {why}."
    if not again.spikes:
        return "undecided", f"With {AGAIN} from step {first} on it stays at {said(again.peak)}: {why}."
    if exact.spikes:
        also = f"Exact attention from step {first} on also spikes (loss {said(exact.peak)})"
        if missed:
            return "undecided", f"{also}, but other attention ran beside it, which was not made exact: {missed}."
        return "not attention", f"{also}: attention is not the cause."
    if not nudged.spikes:
        chance = f"so it does with one weight moved by a last place ({said(nudged.peak)})"
        return "undecided", f"{stays.capitalize()}, but {chance}: any change may move this spike. Ask again with other seeds."
    if exact.peak > usual:
        part = f"With exact attention from step {first} on the loss still rises to {said(exact.peak)}"
        return "undecided", f"{part}: attention makes the spike larger, and is not its only cause."
    others, head = {each.title: each for each in rest}, heads[0]
    finite = math.isfinite(head["logit_std"])
    facts = [f"logits of std {head['logit_std']:.3g}" if finite else f"a largest logit of {head['largest_logit']:.3g}"]
    facts += [f"P saturates in {head['saturated']:.0%} of rows"] * (head["saturated"] > 0.5)
    facts += [f"keys share the largest score in {head['tied']:.0%} of rows"] * (head["tied"] > 0.5)
    name = f"head {head['head']} of {head['layer'] or 'the model'}"
    about = f"({', '.join(facts)}, an error of {head['error']:.2g})"
    place = f"not {name} alone, which errs most {about}" if others[ALONE].spikes else f"{name} {about}"
    healing = [each.title.removeprefix(STEP) for each in rest if each.title.startswith(STEP) and not each.spikes]
    step = f"One exact step is enough: {'; '.join(healing)}" if healing else "No exact step alone removes the spike"
    if EMULATED in others and others[EMULATED].spikes is False:
        step = "Its tiled emulation does not spike, so that no step is named"
    return "attention", f"{place[0].upper()}{place[1:]}: {stays}. {step}."


def said(loss: float) -> str:
    return f"{loss:.3g}" if math.isfinite(loss) else "inf or NaN"


class HeadLog(Recorder):
    """Answers calls by an attention, or lets them go on, and keeps the figures of some heads in some steps.

    It looks in `every` so many steps (0: never) at so many KV `heads` of a layer in turn (None: all). Attention of the head
    `exact` is exact. `of_step` holds what is known of a step itself, and `last` is of the last call that was looked at.
    """

    def __init__(
        self, model: nn.Module, attention: Variant | None, every: int = 0, heads: int | None = None, exact: Place | None = None
    ) -> None:
        super().__init__(model, read_masks=True)
        self._attention = None if attention is None else trainable(attention)
        self._policy: Precision | None = attention.primal.precision if isinstance(attention, (Backward, ForwardAlone)) else None
        self._every, self._heads, self._exact = every, heads, exact
        self._looks: list[_Look] = []
        self._figures: list[tuple[list[dict[str, Any]], Tensor]] = []  # with the places of looks
        self.of_step: dict[int, dict[str, float]] = {}
        self.last: tuple[Shape, Format, Mask]

    @property
    def looks_now(self) -> bool:
        """Whether figures of this step are kept."""
        return self._every > 0 and self._step % self._every == 0

    @property
    def is_idle(self) -> bool:
        """Whether the calls of this step go on: being `active` costs some microseconds for each operation of a model."""
        return self._attention is None and self._exact is None and not self.looks_now

    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        number, layer = self._call()
        replaces = self._exact is not None and self._exact[:2] == (layer, number)
        if self._attention is None and not self.looks_now and not replaces:
            return onward(arguments)
        q = arguments.query.view_as(arguments.query)  # a node of its own, whose gradient is dQ of this call alone
        arguments = replace(arguments, query=q)
        call = Call.of(arguments, self._reader)
        if self._attention is None:
            out = onward(arguments).reshape(*call.q.shape[:3], call.v.shape[-1])
        else:
            out = self._attention.attend(q, call.k, call.v, call.mask, call.scale)
        if self.looks_now:
            self._look(call, q, out, {"step": self._step, "layer": layer, "call": number})
        if replaces and self._exact is not None:
            exact = ExactBackward().attend(call.q, call.k, call.v, call.mask, call.scale)
            chosen = torch.arange(exact.shape[1], device=exact.device) == self._exact[2]
            out = torch.where(chosen[:, None, None], exact, out)
        return call.shaped(out)

    def _look(self, call: Call, q: Tensor, out: Tensor, place: dict[str, Any]) -> None:
        """Keep what the figures of some heads of a call are made of."""
        (batch, heads, queries, dim), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
        self.last = Shape(batch, heads, kv_heads, queries, keys, dim), format_of(call.q.dtype), call.mask
        group, count = heads // kv_heads, min(self._heads or kv_heads, kv_heads)
        first = min(self._step // self._every * count % kv_heads, kv_heads - count)
        own = slice(first * group, (first + count) * group)

        def of_q(x: Tensor) -> Tensor:  # is held by the graph, so it holds no tensor of the graph
            return x.detach().reshape(batch, heads, queries, x.shape[-1])[:, own].clone()

        tensors = {"q": of_q(call.q), "out": of_q(out)}
        tensors |= {name: x.detach()[:, first : first + count].clone() for name, x in (("k", call.k), ("v", call.v))}
        mask = call.mask.of_heads(own.start, own.stop)
        self._looks.append(_Look(place | {"head": own.start}, mask, softmax_scale(call.q, call.scale), tensors))
        if out.requires_grad and q.requires_grad:
            out.register_hook(lambda do: tensors.__setitem__("do", of_q(do)))
            q.register_hook(lambda dq: tensors.__setitem__("dq", of_q(dq)))

    def _write(self) -> None:
        """Have the heads that were looked at computed exactly, and their errors reduced, on the device."""
        looks, self._looks, alike = self._looks, [], defaultdict[Hashable, list[_Look]](list)
        for look in looks:
            alike[look.kind].append(look)
        for same in alike.values():
            scores = math.prod(same[0].tensors["q"].shape[:3]) * same[0].tensors["k"].shape[2]
            at_once = max(_AT_ONCE // scores, 1)
            for first in range(0, len(same), at_once):
                some = same[first : first + at_once]
                self._figures.append(([look.place for look in some], self._compared(some)))

    @torch.no_grad()
    def _compared(self, looks: list[_Look]) -> Tensor:
        """`[figures, heads]` of calls of one kind, one after the other: the heads of one call."""
        tensors = {name: torch.cat([look.tensors[name] for look in looks], 1) for name in looks[0].tensors}
        q, k, v, out = (tensors[name] for name in ("q", "k", "v", "out"))
        policy = self._policy or Precision.kernel(format_of(q.dtype))
        with uncast(q):
            exact = ExactCall((q, k, v), looks[0].mask, looks[0].scale)
            is_rounded = policy.inputs == Cast(format_of(q.dtype))
            s = exact.scores(*((q, k) if is_rounded else policy.round_inputs(q, k, v)[:2]), policy)
            logits, count = exact.without(s, 0.0).double(), _of_heads(exact.without(torch.ones_like(s), 0.0), torch.sum)
            mean, square = (_of_heads(x, torch.sum) / count for x in (logits, logits.square()))
            figures = {
                "largest_logit": _of_heads(logits.abs(), torch.amax),
                "logit_std": (square - mean.square()).clamp(0).sqrt(),
                "saturated": _of_heads((exact.p.amax(-1, keepdim=True) > 1 - policy.format.u / 2).double()),
                "tied": _of_heads(exact.tied(s)[..., None].double()),
            }
            outputs = {"out": (exact.out, exact.grouped(out).sub(exact.out))}
            if "dq" in tensors:
                exact.take(tensors["do"])
                outputs["dq"] = exact.dq, exact.grouped(tensors["dq"]).sub(exact.dq)
        for name, pair in outputs.items():
            figures |= {f"{name}_{one}": _of_heads(x.square()).sqrt() for one, x in zip(("size", "rmse"), pair, strict=True)}
        errors = [error for _, error in outputs.values()]
        same = len({error.shape for error in errors}) == 1
        ranks = _ranks(torch.stack(errors)) if same else [_ranks(error[None])[0] for error in errors]
        figures |= {f"{name}_rank": rank for name, rank in zip(outputs, ranks, strict=True)}
        unknown = torch.full_like(figures["out_size"], math.nan)
        return torch.stack([figures.get(name, unknown) for name in FIGURES])

    def rows(self) -> list[dict[str, Any]]:
        """One for each step, call and head since the last time; waits for the device."""
        self._write()
        figures, self._figures, rows = self._figures, [], list[dict[str, Any]]()
        for places, values in figures:
            for place, of_call in zip(places, values.unflatten(1, (len(places), -1)).unbind(1), strict=True):
                for head, column in enumerate(of_call.T.tolist(), place["head"]):
                    step = self.of_step.get(place["step"], {})
                    rows.append(place | {"head": head} | step | dict(zip(FIGURES, column, strict=True)))
        return sorted(rows, key=lambda row: (row["step"], row["call"], row["head"]))


@dataclass(frozen=True, eq=False)
class _Look:
    """Some heads of a call, the first one at a place: copies of their q, k, v and out, later of do and dq."""

    place: dict[str, Any]
    mask: Mask
    scale: float
    tensors: dict[str, Tensor]

    @property
    def kind(self) -> Hashable:
        """Equal for calls that can be computed as heads of one: only a bias of each head may differ from one to the other."""
        own = id(self) if self.mask.bias is not None and self.mask.bias.values.shape[1] > 1 else None
        return self.mask, self.scale, own, *((name, x.shape, x.dtype) for name, x in self.tensors.items())


def _ranks(errors: Tensor) -> Tensor:
    """Stable ranks of `[outputs, batch, kv_heads, group, rows, dim]`, the mean over the batch: `[outputs, heads]`."""
    matrices = errors.flatten(0, 3)
    energy = matrices.square().sum((-2, -1))
    usable = energy.isfinite() & (energy > 0)  # anything else has no eigenvalues, or no direction
    top, _ = largest_singular(matrices.masked_fill(~usable[:, None, None], 0.0))
    return torch.where(usable, energy / top, math.nan).view(errors.shape[:4]).mean(1).flatten(1)


def _of_heads(x: Tensor, reduce: Callable[..., Tensor] = torch.mean) -> Tensor:
    """Of `[batch, kv_heads, group, rows, any]` one number for each head."""
    return reduce(x, (0, 3, 4)).flatten()
