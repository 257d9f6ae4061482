"""Log-probabilities of one model by two engines, a trainer and a sampler, and which operation makes their difference: `mismatch`.

An engine says by which implementation each operation of the model is computed. The model is not changed: calls are exchanged as
`attend` exchanges attention. Both engines see the same held-out tokens (teacher forcing). With
`D_t = log p_trainer - log p_sampler` of token t and `v(S)` the variance over tokens of D where the operations S are computed as
the sampler does and all others as the trainer does, the full factorial design over k operations (Box, Hunter & Hunter 2005,
chapter 5) gives

    main effect   e_i  = mean over S without i of        v(S + i) - v(S)
    interaction   e_ij = mean over S without i and j of  v(S + i + j) - v(S + i) - v(S + j) + v(S)

Shares are effects over v of all operations. Main effects add up to v, and explain it, unless effects depend on three operations
or more: half of each interaction of two is in the main effect of each. exp(D_t) is the importance ratio of a token, and exp of
the sum of D up to t that of a sequence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from numdev.arithmetic.formats import BF16, FP32, FP64, Format
from numdev.arithmetic.quantise import Scale
from numdev.arithmetic.rounding import Cast
from numdev.attention.mask import Mask
from numdev.attention.operation import environment, settings_of, texts_of
from numdev.attention.precision import Precision
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import BadInput
from numdev.measurement.operation import Draws, Operation, Output
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.operations import logprob, matmul, rmsnorm, router, scan
from numdev.results.record import Column, Record, Use
from numdev.settings import held, setting
from numdev.training import tasks
from numdev.training.attend import ForwardAlone, attend
from numdev.training.run import Run, deterministic, model_of
from numdev.training.rung import Numerics, Rung
from numdev.training.weights import finished

KIND = "mismatch"
_TOO = {"rmsnorm": ("residual",), "matmul": ("batch",)}
EXCHANGED = {one: (one, *_TOO.get(one, ())) for one in ("attention", "rmsnorm", "matmul", "router", "scan", "logprob")}
"""The operations that are exchanged, and the fields of an engine that go with each: a fused norm adds the residual stream too."""
_REPLICATES = 16  # disjoint sets of held-out sequences
_BINS = 16  # parts of a sequence
_LIMITS = {"outside_10": 0.1, "outside_1": 0.01}


@dataclass(frozen=True)
class Cached:
    """Tiled attention under `kernel(format)`, of keys in splits, as decode kernels have them, from a cache in another format."""

    format: Format = setting(BF16, "q, k, v, P and O; all else is in FP32 or wider", "format")
    splits: int = setting(1, "contiguous ranges of keys, each with a result of its own, combined by their log-sum-exp", "count")
    cache: Cast | None = setting(
        None, "k and v as the cache has them, with a scale of each token and head; null is the format", "format"
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        precision = Precision.kernel(self.format)
        if self.cache is not None:
            quantise = {"to": self.cache, "scale": Scale.ROW, "queries": Cast(self.format)}
            precision = Precision(preset=f"kernel_{self.format}", quantise=quantise)
        return ForwardAlone(Tiled(precision, Tiling(bc=32, splits=self.splits))).attend(q, k, v, mask, scale)


@dataclass(frozen=True)
class Engine:
    """How each operation of a model is computed: by implementations of `numdev.operations`, and one of attention."""

    attention: Any = held()
    rmsnorm: Any = held()
    matmul: Any = held()
    router: Any = held()
    scan: Any = held()
    logprob: Any = held()
    residual: Format = setting(FP32, "the residual stream, after each addition", "format")
    batch: int = setting(0, "rows that one call multiplies, as the tokens of a step of decoding; 0 is all", "count")

    def __post_init__(self) -> None:
        if self.batch < 0:
            raise BadInput("engine.batch", self.batch, "give the rows of a call, or 0 for all")

    @classmethod
    def exact(cls) -> Engine:
        """Everything in FP64: golden."""
        parts = rmsnorm.Eager(FP64), matmul.Torch(FP64), router.Eager(FP64), scan.Eager(FP64), logprob.Torch(FP64)
        return cls(Cached(FP64), *parts, FP64)

    def exchanged(self, other: Engine, operations: tuple[str, ...]) -> Engine:
        """With some operations as another engine has them."""
        return replace(self, **{name: getattr(other, name) for one in operations for name in EXCHANGED[one]})

    @torch.no_grad()
    def log_probabilities(
        self, model: tasks.LanguageModel, tokens: Int[Tensor, "sequences tokens"], kept: dict[Any, Any] | None = None
    ) -> Float64[Tensor, "sequences predicted"]:
        """Those of each token but the first, given all before it, on the CPU.

        The model's tensors between operations are in its dtype, which holds every number of the operations' formats. `kept` holds
        what calls with the same model and tokens share: rounded weights, and results of operations that they have in common.
        """
        kept = {} if kept is None else kept
        headless = replace(self, logprob=None)
        if headless not in kept:
            with attend(self.attention) as seen, _Exchange(self, kept):
                kept[headless] = model.hidden(tokens[:, :-1])
            seen.require()
        inputs = self.logprob.round_inputs(kept[headless].flatten(0, 1), model.out.weight, tokens[:, 1:].flatten().double())
        result: Tensor = self.logprob(*inputs).tensors()["logprob"].double().view(len(tokens), -1).cpu()
        return result


class _Exchange(TorchFunctionMode):
    """Answers the calls of a model's operations but attention and the head by those of an engine."""

    def __init__(self, engine: Engine, kept: dict[Any, Any]) -> None:
        super().__init__()
        self._engine, self._kept, add = engine, kept, Cast(engine.residual)
        softmax = partial(_answered, engine.router, "weights", score=router.Score.SOFTMAX)
        self._answers: dict[Any, Callable[..., Tensor]] = {
            functional.linear: self._linear,
            functional.rms_norm: lambda x, _, weight, eps: _answered(engine.rmsnorm, "y", x, x.flatten(0, -2), weight, eps=eps),
            tasks.route: lambda x, w, k: softmax(x, x.flatten(0, -2), w, k=k),
            tasks.scan: self._scan,
            torch.Tensor.add: lambda x, y: add((x + y).double()).to(x.dtype),
        }

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._answers:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # what an answer calls is of no interest, and is a lot
            return self._answers[func](*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        matmul, rows = self._engine.matmul, x.flatten(0, -2)
        key = id(weight), matmul.input_key
        if key not in self._kept:
            self._kept[key] = matmul.round_inputs(weight.mT)[0]
        parts = matmul.round_inputs(rows)[0].split(self._engine.batch or len(rows))
        c = torch.cat([matmul(part, self._kept[key]).tensors()["c"] for part in parts]).to(x.dtype)
        return (c if bias is None else c + bias).unflatten(0, x.shape[:-1])

    def _scan(self, *inputs: Tensor) -> Tensor:
        calls = self._kept.setdefault(self._engine.scan, [])  # 8 of the 64 engines of a factorial differ before or in it
        for before, o in calls:
            if all(map(torch.equal, before, inputs)):
                return o
        o = _answered(self._engine.scan, "o", inputs[2], *inputs, rule=scan.Rule.DELTA)
        calls.append((inputs, o))
        return o


def _answered(operation: Any, output: str, x: Tensor, *inputs: Tensor, **how: Any) -> Tensor:
    """An output of an operation in the dtype of x, and in its shape but for the last dimension."""
    y = operation(*operation.round_inputs(*inputs), **how).tensors()[output]
    return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class Problem(Draws):
    """A language model that is trained once, in FP32, and kept; a replicate is a set of held-out sequences of its own."""

    task: Any = held(follows="task")  # a `Language`; others are refused
    seed: int = setting(0, "of the initial weights and of the order of the data")
    sequences: int = setting(8, "held-out sequences of a replicate", "count")
    factorial: bool = setting(
        True, "whether every set of operations is exchanged, and the variance attributed; else all of them at once alone"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.task, tasks.Language):
            raise BadInput("task", type(self.task).__name__, "log-probabilities are of tokens; give task=language")
        if self.sequences < 2:
            raise BadInput("problem.sequences", self.sequences, "give at least 2")
        self.task.data.ready(_REPLICATES * self.sequences * (self.task.length + 1))  # sets of sequences share no token

    def tokens(self, seed: int) -> Int[Tensor, "sequences tokens"]:
        """The sequences of a replicate: every 16th of those that lie at equal distances in the held-out text."""
        if seed >= _REPLICATES:
            raise BadInput("seeds", seed + 1, f"there are {_REPLICATES} sets of held-out sequences; give at most so many")
        return self.task.data.held_out(_REPLICATES * self.sequences, self.task.length + 1)[seed::_REPLICATES]


_SEED = Column("seed", "", "the replicate: a set of held-out sequences", Use.PLACE)
_OUTSIDE = tuple(
    Column(name, "relative", f"share of tokens whose importance ratio lies outside [{1 - limit:g}, {1 + limit:g}]", Use.CHIEF)
    for name, limit in _LIMITS.items()
)
TABLES: dict[str, tuple[Column, ...]] = {
    KIND: (
        _SEED,
        Column("std", "nat", "standard deviation of D = log p_trainer - log p_sampler over tokens", Use.CHIEF),
        *_OUTSIDE,
        Column("mean", "nat", "mean of D"),
        Column("largest", "nat", "largest |D|"),
        Column("explained", "relative", "sum of the main effects over the variance of D; NaN unless factorial"),
        Column("interactions", "relative", "sum of |e_ij| over the variance of D; NaN unless factorial"),
        Column("trainer_error", "nat", "RMS error of the trainer's log-probabilities from those in FP64"),
        Column("sampler_error", "nat", "RMS error of the sampler's"),
        Column("loss", "nat", "mean of -log p of the trainer"),
    ),
    "effects": (
        _SEED,
        Column("effect", "", "an operation, two that interact, or `three or more`, what is not explained", Use.PLACE),
        Column("order", "count", "how many operations it is of; 3 for `three or more`", Use.PLACE),
        Column("share", "relative", "the effect over the variance of D with all operations exchanged", Use.CHIEF),
        Column("first", "relative", "v where these alone are the sampler's, over that variance"),
        Column("last", "relative", "1 - v where these alone are the trainer's, over that variance"),
        *(
            replace(one, name=f"{one.name}_without", meaning=f"{one.meaning}, where these are the trainer's", use=Use.FIGURE)
            for one in _OUTSIDE
        ),
    ),
    "lengths": (
        _SEED,
        Column("position", "tokens", "last token of a part of the sequences", Use.PLACE),
        *_OUTSIDE,
        Column("std", "nat", "standard deviation of D over the tokens of the part"),
        Column("sequence_std", "nat", "root mean square over sequences of the sum of D up to the position"),
        Column("sequence_outside_10", "relative", "share of sequences whose ratio up to the position lies outside [0.9, 1.1]"),
    ),
}


def _settings() -> tuple[Column, ...]:
    """What the settings of problems and engines mean."""
    variant = texts_of(Engine)
    for name in EXCHANGED:
        variant |= texts_of(type(getattr(MISMATCH.golden, name)), prefix=f"{name}.")
    return settings_of(texts_of(Problem) | texts_of(tasks.Language, prefix="task."), variant)


MISMATCH = Operation(
    name=KIND,
    golden=Engine.exact(),  # of a model, not of tensors
    inputs=(),
    outputs=(Output("logprob", "the log-probability of a token"),),
    settings=_settings,
    environment=environment,
    smaller="fewer problem.sequences, or a smaller task.length",
)


@dataclass(frozen=True)
class Mismatches(Kind):
    """The kind `mismatch`: the variant is the sampler, the baseline the trainer."""

    operation: Operation = MISMATCH
    name: ClassVar[str] = KIND
    columns: ClassVar[dict[str, tuple[Column, ...]]] = TABLES

    def figure(self, name: str, record: Record) -> float | None:
        values = [row[name.rpartition(".")[2]] for row in record.rows]
        return sum(values) / len(values) if values else None

    def run(self, point: Point, context: Context) -> Findings:
        """Trains the model unless it is there. Raises BadInput for what is no problem or no engine of this kind."""
        for name, made, kind in zip(("problem", "variant", "baseline"), point, (Problem, Engine, Engine), strict=False):
            if not isinstance(made, kind):
                raise BadInput(name, type(made).__name__, f"it is no {kind.__module__}.{kind.__name__}")
        tables: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        with tempfile.TemporaryDirectory() as alone:  # removed afterwards where nothing is stored
            run = Run(point.problem.task, Rung(VanillaBackward(FP32), Numerics.FP32, seed=point.problem.seed))
            trained = finished(run, "the model", Path(alone) if context.shared is None else context.shared, context)
            weights = trained.weights(run.task.steps, buffers=True)
        model: Any = model_of(run, context.device, weights)
        golden: Any = model_of(run, context.device, weights).double()
        with deterministic():
            torch.use_deterministic_algorithms(True, warn_only=True)  # an emulation may have none on a GPU
            for seed in context.replicates():
                tokens, own = point.problem.tokens(seed).to(context.device), dict[Any, Any]()
                place = KIND, run, point.problem.sequences, seed  # points share the engines that they have in common
                exact = context.kept.get(place, partial(Engine.exact().log_probabilities, golden, tokens))
                names = tuple(EXCHANGED) if point.problem.factorial else ()

                def computed(operations: tuple[str, ...], place: Any = place, tokens: Tensor = tokens, own: Any = own) -> Tensor:
                    engine = point.baseline.exchanged(point.variant, operations)
                    return context.kept.get((*place, engine), partial(engine.log_probabilities, model, tokens, own))

                for table, rows in compared(computed, exact, names).items():
                    tables[table] += [{"seed": seed} | row for row in rows]
        broken = sum(not row["std"] < float("inf") for row in tables[KIND])
        return Findings(tables, nonfinite=f"log-probabilities of {broken} replicates" if broken else "")


def compared(
    computed: Callable[[tuple[str, ...]], Float64[Tensor, "sequences tokens"]],
    exact: Float64[Tensor, "sequences tokens"],
    operations: tuple[str, ...] = (),
) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table of one replicate; effects are those of `operations`.

    `computed` has the log-probabilities where some operations are the sampler's.
    """
    trainer, sampler = computed(()), computed(tuple(EXCHANGED))
    d = trainer - sampler
    total = float(d.var(correction=0))
    rows, sums = list[dict[str, Any]](), {"explained": float("nan"), "interactions": float("nan")}
    if operations:
        differences = {own: trainer - computed(own) if own else torch.zeros_like(d) for own in _sets(operations)}
        variances = {own: float(x.var(correction=0)) for own, x in differences.items()}
        for own, effect in effects(operations, variances).items():
            rest = tuple(name for name in operations if name not in own)
            without = {f"{name}_without": share for name, share in _outside(differences[rest]).items()}
            parts = effect, variances[own], total - variances[rest]
            share, first, last = (part / total if total else float("nan") for part in parts)
            rows.append({"effect": " x ".join(own), "order": len(own), "share": share, "first": first, "last": last, **without})
        sums["explained"] = sum(row["share"] for row in rows if row["order"] == 1)
        sums["interactions"] = sum(abs(row["share"]) for row in rows if row["order"] == 2)
        left = {"effect": "three or more", "order": 3, "share": 1 - sums["explained"]}
        rows.append(dict.fromkeys(rows[0], float("nan")) | left)
    whole = {
        "std": total**0.5,
        **_outside(d),
        "mean": float(d.mean()),
        "largest": float(d.abs().max()),
        **sums,
        "trainer_error": float((trainer - exact).square().mean().sqrt()),
        "sampler_error": float((sampler - exact).square().mean().sqrt()),
        "loss": -float(trainer.mean()),
    }
    return {KIND: [whole], "effects": rows, "lengths": [*_over_lengths(d)]}


def effects(operations: tuple[str, ...], v: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """Main effects, and interactions of two, of a function of sets of operations, each in their order."""
    sets = [*_sets(operations)]

    def effect(of: tuple[str, ...]) -> float:
        signed = [(-1) ** len(set(of) - set(own)) * v[own] for own in sets]
        return sum(signed) / 2 ** (len(operations) - len(of))

    return {own: effect(own) for own in sets if len(own) in (1, 2)}


def _sets(operations: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(operations, size) for size in range(len(operations) + 1))


def _outside(d: Tensor) -> dict[str, float]:
    """The shares of importance ratios that are further from 1 than each limit."""
    return {name: float(((d.exp() - 1).abs() > limit).double().mean()) for name, limit in _LIMITS.items()}


def _over_lengths(d: Float64[Tensor, "sequences tokens"]) -> Iterator[dict[str, Any]]:
    """The figures of each part of the sequences."""
    sums, size = d.cumsum(-1), max(d.shape[-1] // _BINS, 1)
    for end in range(size, d.shape[-1] + 1, size):
        part, whole = d[:, end - size : end], sums[:, end - 1]
        spread = {"std": float(part.std(correction=0)), "sequence_std": float(whole.square().mean().sqrt())}
        yield {"position": end, **_outside(part), **spread, "sequence_outside_10": _outside(whole)["outside_10"]}
