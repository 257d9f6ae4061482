"""The inputs on which a kernel is judged, and the errors that a policy permits on them, predicted once and kept on disk.

Cases are small problems, each of which makes some faults large. A case draws q, k, v and dO in FP64 from each of its seeds,
rounds them once to the format of the kernel, and says what is masked. Replicates are batch entries. Its last tile is ragged for
every size of a tile, since neither 1000 nor 150 is a multiple of 16.

Permitted is the largest error among the kernels of the declared policy: tiled attention in the usual tiles, in either order, with
and without lazy rescales, and with split keys. A ratio of 1 is that; its interval is Student's t over the seeds, in logarithms,
where kernel and prediction have the same inputs.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Saved
from numdev.attention.captured import Captured
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape, Source, draw_do
from numdev.attention.softmax import Exponential, OnlineSoftmax, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.certification.candidates import Candidate, backward_catalogue, forward_catalogue
from numdev.certification.simulation import LAZY, Cut, Inputs, Layout, Scheme, Simulation, Tensors
from numdev.results.environment import environment
from numdev.results.record import key_of, student_quantile, write_atomically

_RISE = 12.0  # of the scores from the first key to the last, or back
_ABOVE = 11.0  # of the score of a sink, at which most P are subnormal in FP16
ABSURD = 1e9
"""The ratio of a result that is not finite, or not 0, where golden is."""
_NOTHING = 2e-12  # ratios up to this are of results without an error
FIGURES = ("rmse", "largest", "bias")
LIMIT_OF_LARGEST = 2.0
"""Of the largest error and the bias, beside the margin of the RMSE: so much they differ between tiles of one policy."""
_LIMIT_OF_LSE = 2.0
# An LSE is a sum of a maximum and a logarithm, each rounded to FP32; this, relative to it, is what exp2 and log2 may add.
_LSE_FLOOR = 2.0**-19
_FLOOR_OF_ZEROS = 30.0  # times the permitted error, so that four times that passes where golden is 0 throughout
_MOST_SEEDS = 1000
_MOST_BYTES = 1 << 32  # of all predictions that are kept
DECIDES = 3.0
"""Times the permitted error that zeros have to err, for a case to tell a kernel from zeros."""
Page = dict[str, Tensors]


def _columns(x: Tensors, scale: float, cast: Cast, generator: torch.Generator) -> None:
    """Nearly constant columns of v: `O = c sum(P~) / l` shows what the row sum and the division lose, far below an ulp of c."""
    base = torch.linspace(1.0, 1.9, x["v"].shape[-1], dtype=torch.float64)
    x["v"] = base + torch.rand(x["v"].shape, generator=generator, dtype=torch.float64) / 8


def _silent(x: Tensors, scale: float, cast: Cast, generator: torch.Generator) -> None:
    """A first key of value 0, whose score is far above the others, as the sinks of trained models: out is of small P alone."""
    x["q"][..., 0], x["k"][..., 0, :], x["v"][..., 0, :] = 1.0, 0.0, 0.0
    x["k"][..., 0, 0] = _ABOVE / scale


def _null(x: Tensors, scale: float, cast: Cast, generator: torch.Generator) -> None:
    """V with `softmax(S) V = 0` but for its own rounding: what is left of O are errors, of which the output keeps all bits."""
    weights = torch.softmax(cast(x["q"]) @ cast(x["k"]).mT * scale, -1)
    x["v"] = x["v"] - weights.mT @ torch.linalg.solve(weights @ weights.mT, weights @ x["v"])


def _ramp(x: Tensors, scale: float, cast: Cast, generator: torch.Generator) -> None:
    """`_null`, with scores that rise with the key in even heads and fall in odd ones, so that either order meets rescales."""
    keys, falls = x["k"].shape[-2], torch.arange(x["k"].shape[1]) % 2 == 1
    rise = torch.linspace(0.0, _RISE, keys, dtype=torch.float64) / scale
    x["q"][..., 0] = 1.0
    x["k"][..., 0] = torch.where(falls[:, None], rise.flip(0), rise)
    _null(x, scale, cast, generator)


@dataclass(frozen=True)
class Case:
    """A kind of inputs."""

    name: str  # by which a report and a command name it
    shows: str  # the errors that it makes large, in words
    source: Source = Distribution(Kind.NORMAL)
    heads: int = 2
    kv_heads: int = 2
    batch: int = 1
    queries: int = 32
    keys: int = 1000
    mask: Mask = Mask()
    change: Callable[[Tensors, float, Cast, torch.Generator], None] | None = None
    names: bool = False  # whether the culprit of a failure is looked for on it too
    alone: bool = False  # whether that is so only where no other case fails
    head_dim: int | None = None

    def draw(self, seeds: range, fmt: Format, head_dim: int) -> Inputs:
        """The inputs of some seeds, and dO for the backward pass; the same on every machine."""
        shape = Shape(self.batch, self.heads, self.kv_heads, self.queries, self.keys, self.head_dim or head_dim)
        problem, cast = Problem(self.source, shape, self.mask), Cast(fmt)

        def drawn(seed: int) -> Tensors:
            seed %= self.source.replicates(shape) or seed + 1  # captured tensors have so many
            tensors = {name: x.clone() for name, x in problem.inputs(seed).items()}
            if self.change is not None:
                self.change(tensors, problem.softmax_scale, cast, torch.Generator().manual_seed(seed + 7919))
            return tensors | draw_do(problem, seed, torch.device("cpu"))

        replicates = [drawn(seed) for seed in seeds]
        tensors = {name: cast(torch.cat([each[name] for each in replicates])).to(fmt.dtype) for name in replicates[0]}
        lengths = self.mask.key_lengths and self.mask.key_lengths * len(seeds)
        return Inputs(tensors, replace(self.mask, key_lengths=lengths), problem.softmax_scale, len(seeds))


_SMALL = Case("small", "", batch=2, heads=4, kv_heads=4, queries=70, keys=150)
CASES = (
    Case("normal", "the usual error", names=True),
    Case("uniform", "sums of one sign, which grow with the keys", Distribution(Kind.UNIFORM)),
    Case("student t", "a few large entries", Distribution(Kind.STUDENT_T)),
    Case("large logits", "saturated rows, and errors of the scores", Distribution(Kind.NORMAL_LOGITS, std=4.0), names=True),
    Case("outliers", "errors of the scale and of the scores", Distribution(Kind.OUTLIERS)),
    Case("ties", "rows with equal largest scores", Distribution(Kind.TIED, copies=4)),
    Case("sink", "a row sum of one large and many small terms", Distribution(Kind.SINK), names=True),
    Case("silent sink", "P near 0, and what is flushed", change=_silent, alone=True),
    Case("columns", "errors of the row sum and of the division", change=_columns),
    Case("null", "errors of the scores and of P", change=_null),
    Case("ramp", "rescales in either order of the tiles", change=_ramp, names=True),
    Case("long", "sums over many tiles", queries=16, keys=6000, change=_ramp, names=True),
    Case("many queries", "sums over many tiles of queries", queries=1000, keys=72, names=True),
    # V below the normal numbers of FP16, and exact in BF16 and FP32 by its scale of a power of two
    Case("tiny values", "flushed or saturated values", change=lambda x, *_: x.update(v=x["v"] * 2.0**-20)),
    replace(_SMALL, name="causal", shows="the causal limit", mask=Mask(causal=True), names=True),
    replace(_SMALL, name="tall causal", shows="more queries than keys", queries=150, keys=70, mask=Mask(causal=True), names=True),
    replace(_SMALL, name="window", shows="the limits of a window", mask=Mask(causal=True, window=40), names=True),
    replace(_SMALL, name="key lengths", shows="padded keys", mask=Mask(key_lengths=(90, 150)), names=True),
    replace(_SMALL, name="grouped heads", shows="which head of k and v a query reads", kv_heads=2, names=True),
    replace(_SMALL, name="one key", shows="a softmax of one score", keys=1),
    Case("few keys", "roundings within one tile of any size", heads=4, kv_heads=4, queries=96, keys=16, names=True),
    replace(_SMALL, name="one query", shows="decoding", queries=1, keys=1000),
    Case("captured", "tensors of a trained model", Captured("minilm"), heads=2, queries=256, keys=256, head_dim=32, names=True),
)
"""Every case, in the order in which they are judged."""


def _forward_emulated(inputs: Inputs, policy: Precision, layout: Layout) -> Tensors:
    """What tiled attention returns, in FP32 as kernels work; of schemes that it does not have a simulation."""
    if layout.scheme not in (Scheme.RUNNING, Scheme.LAZY) or layout.cut is Cut.KEYS:
        return Simulation(inputs, policy, layout, {}).forward()
    softmax = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=LAZY / math.log(2) * (layout.scheme is Scheme.LAZY))
    q, k, v = (x.to(policy.carrier) for x in inputs.qkv)
    return Tiled(policy, layout.tiling, softmax, count=False)(q, k, v, inputs.mask, inputs.scale).tensors()


def _backward_emulated(inputs: Inputs, policy: BackwardPrecision, layout: Layout) -> Tensors:
    q, k, v, do, out, lse = (inputs[name].to(policy.carrier) for name in ("q", "k", "v", "do", "out", "lse"))
    run = TiledBackward(Exact(), policy, layout.tiling, Recompute(exponential=Exponential.EXP2), count=False)
    return run.backward(q, k, v, do, Saved(out, lse), inputs.mask, inputs.scale).tensors()


_USUAL = tuple(Layout(bc, reverse) for bc in (32, 64, 128) for reverse in (False, True))  # of the kernels that ship


@dataclass(frozen=True)
class Pass:
    """The forward or the backward pass."""

    outputs: tuple[str, ...]  # the first of them is primary
    policy: Callable[[str], Any]  # by the name of a preset
    golden: Callable[[Inputs], Tensors]  # exact outputs
    usual: tuple[Layout, ...]  # layouts of the kernels that ship; their largest error is what a policy permits
    emulated: Callable[[Inputs, Any, Layout], Tensors]  # what such a kernel returns
    simulated: Callable[[Simulation], Tensors]  # what a candidate returns
    catalogue: Callable[[Any], Iterator[Candidate]]


FORWARD = Pass(
    outputs=("out", "lse"),
    policy=Precision.parse,
    golden=lambda inputs: Exact()(*inputs.qkv, inputs.mask, inputs.scale).tensors(),
    usual=(
        *(*_USUAL, *(replace(each, scheme=Scheme.LAZY) for each in _USUAL), Layout(64, splits=4, cut=Cut.EVEN)),
        *(Layout(scheme=Scheme.DIVIDED), Layout(64, scheme=Scheme.WHOLE)),
    ),
    emulated=_forward_emulated,
    simulated=Simulation.forward,
    catalogue=forward_catalogue,
)
BACKWARD = Pass(
    outputs=("dq", "dk", "dv"),
    policy=BackwardPrecision.parse,
    golden=lambda inputs: ExactBackward()(*inputs.qkv, inputs.tensors["do"], inputs.mask, inputs.scale).tensors(),
    usual=_USUAL,
    emulated=_backward_emulated,
    simulated=Simulation.backward,
    catalogue=backward_catalogue,
)


class Predictions:
    """Predictions of one declared policy, which serve every kernel, of cases with a `head_dim` unless they have their own.

    They are kept in `folder`; None keeps them in memory alone.
    """

    def __init__(self, precision: str, head_dim: int = 64, folder: Path | None = None, of_pass: Pass = FORWARD) -> None:
        self.precision, self.head_dim, self.folder, self.of_pass = precision, head_dim, folder, of_pass
        self.policy = of_pass.policy(precision)
        self.candidates = tuple({each.title: each for each in of_pass.catalogue(self.policy)}.values())
        self._known = dict[str, Known]()
        self._pages = dict[str, tuple[Path, Page, int]]()  # the file of each, and how many of its predictions are on disk
        # Of the libraries whose sums the predictions have
        self._facts = environment(torch.device("cpu")) | {"threads": "1"}

    def of(self, case: Case, seeds: range) -> Known:
        """What is known of some replicates of a case before any kernel runs."""
        name = f"{case.name} {seeds}"
        if name not in self._known:
            inputs = case.draw(seeds, self.policy.output.to, self.head_dim)
            if self.of_pass is BACKWARD:  # which reads the O and the LSE that a forward pass of the declared policy saves
                saved = _forward_emulated(inputs, Precision.parse(self.precision), Layout(64))
                saved = {"out": saved["out"].to(inputs["q"].dtype), "lse": saved["lse"].float()}
                inputs = replace(inputs, tensors=inputs.tensors | saved)
            self._known[name] = Known(self, name, inputs)
        return self._known[name]

    def page(self, name: str) -> Page:
        """The predictions of a name, from disk where they were made before; to which more may be added."""
        if name not in self._pages:
            key = key_of({"policy": str(self.policy), "head_dim": self.head_dim, "name": name}, self._facts)
            path = (self.folder or Path()) / f"{key}.pt"
            page: Page = torch.load(path, weights_only=True) if self.folder and path.is_file() else {}
            self._pages[name] = path, page, len(page)
        return self._pages[name][1]

    def save(self) -> None:
        """Keep new predictions for other kernels; the oldest go where all exceed 4 GiB."""
        for name, (path, page, saved) in self._pages.items() if self.folder else ():
            if len(page) > saved:
                torch.save(page, data := io.BytesIO())
                write_atomically(path, data.getvalue())
                self._pages[name] = path, page, len(page)
        room, pages = _MOST_BYTES, f"{'[0-9a-f]' * 32}.pt"
        with suppress(OSError):  # another process may remove them too
            for path in sorted(self.folder.glob(pages) if self.folder else (), key=lambda each: -each.stat().st_mtime):
                room -= path.stat().st_size
                if room < 0:
                    path.unlink()


@dataclass(frozen=True)
class Known:
    """Some replicates of a case: inputs, golden, and what is permitted."""

    predictions: Predictions
    name: str
    inputs: Inputs

    @cached_property
    def golden(self) -> Tensors:
        """The exact outputs of the rounded inputs, in FP64."""
        golden = self.predictions.of_pass.golden(self.inputs)
        return {name: golden[name] for name in self.predictions.of_pass.outputs}

    @cached_property
    def exact(self) -> Tensors:
        """Those of golden that a kernel is compared with; what rows hold that see no key is for a probe to say."""
        return self.inputs.rows(self.golden)

    @cached_property
    def permitted(self) -> dict[str, Tensor]:
        """The largest `FIGURES` of each output among the kernels of the policy, `[replicates, figures]`."""
        page, of_pass = self.predictions.page(f"{self.name} permitted"), self.predictions.of_pass
        if not page:
            emulated = (of_pass.emulated(self.inputs, self.predictions.policy, layout) for layout in of_pass.usual)
            family = [self.inputs.rows(each) for each in emulated]
            most = {name: torch.stack([figures(each[name] - x) for each in family]).amax(0) for name, x in self.exact.items()}
            page["permitted"] = most
        return page["permitted"]

    @cached_property
    def floors(self) -> dict[str, Tensor]:
        """What is added to each figure before it is compared: errors that nobody can avoid, or that are chance."""
        floors = {}
        for name, exact in self.exact.items():
            rmse, nothing = self.permitted[name][:, 0], exact.new_zeros(len(exact))
            own = _LSE_FLOOR * (1 + exact.abs().mean(-1)) if name == "lse" else nothing
            spread = 3 * rmse / math.sqrt(exact.shape[-1])  # of the mean of independent errors of that size
            floors[name] = torch.stack([own, nothing, spread], -1)
            if not bool(exact.any()):  # a gradient that is 0, of which there is only noise
                floors[name] = _FLOOR_OF_ZEROS * self.permitted[name]
        return floors

    def ratios(self, outputs: Tensors) -> dict[str, Tensor]:
        """The figures of each output over the permitted ones, `[replicates, figures]`; 1 of two that are 0."""
        ratios = {}
        for name, x in self.inputs.rows(outputs).items():
            own, most = figures(x - self.exact[name]) + self.floors[name], self.permitted[name] + self.floors[name]
            ratios[name] = torch.where(own == most, 1.0, own / most).clamp(max=ABSURD)
        return ratios


def figures(error: Tensor) -> Tensor:
    """RMSE, largest error and bias of rows of errors; infinite where one is not finite."""
    parts = error.pow(2).mean(-1).sqrt(), error.abs().amax(-1), error.mean(-1).abs()
    return torch.stack(parts, -1).nan_to_num(math.inf, math.inf)


class Verdict(Enum):
    """What a certificate says."""

    PASS = "pass"  # as accurate as its policy permits
    LIMITED = "limited"  # so where it claims to be: it refuses some requests, or returns no LSE
    INCONCLUSIVE = "inconclusive"  # more seeds are needed
    FAIL = "fail"


@dataclass(frozen=True)
class Judged:
    """A figure of an output on a case over its seeds: the ratio to what is permitted, its interval, and what that decides.

    Each side of the interval is exceeded in 5 of 100 times. `seeds_needed` would decide what is inconclusive.
    """

    output: str
    figure: str
    limit: float
    ratio: float
    low: float
    high: float
    verdict: Verdict
    seeds_needed: int = 0

    @property
    def is_error(self) -> bool:
        return self.ratio > _NOTHING

    def __str__(self) -> str:
        more = f", {self.seeds_needed} seeds would decide" if self.seeds_needed else ""
        interval = f"{times(self.ratio)} [{times(self.low)}, {times(self.high)}]"
        return f"{self.figure} of {self.output} {interval}, limit {self.limit:.3g}{more}"


def times(ratio: float) -> str:
    return "infinite" if ratio > ABSURD / 2 else f"{ratio if ratio > _NOTHING else 0:.3g}"


def judge(ratios: Mapping[str, Tensor], margin: float) -> list[Judged]:
    """Every figure of a case: FAIL where its interval lies above the limit, PASS below it, else the seeds that would decide."""
    judged = []
    for output, figure in product(ratios, FIGURES):
        if output == "lse" and figure != "rmse":
            continue
        limit = _LIMIT_OF_LSE if output == "lse" else margin if figure == "rmse" else LIMIT_OF_LARGEST * margin
        own = ratios[output][:, FIGURES.index(figure)]
        logs, count, needed = own.clamp(min=_NOTHING / 2).log(), len(own), 0
        centre, spread = float(logs.mean()), float(logs.std()) if count > 1 else 0.0
        half = _half(spread, count)
        low, high = math.exp(centre - half), math.exp(min(centre + half, 700.0))
        fails = low > limit or float(own.min()) >= ABSURD
        verdict = Verdict.FAIL if fails else Verdict.PASS if high <= limit else Verdict.INCONCLUSIVE
        if verdict is Verdict.INCONCLUSIVE:
            distance = abs(math.log(limit) - centre)
            needed = next((seeds for seeds in range(count + 1, _MOST_SEEDS) if _half(spread, seeds) < distance), _MOST_SEEDS)
        judged.append(Judged(output, figure, limit, math.exp(centre), low, high, verdict, needed))
    return judged


def _half(spread: float, count: int) -> float:
    """Half of the interval of a mean of logarithms."""
    return student_quantile(0.9, count - 1) * spread / math.sqrt(count) if count > 1 else 700.0 if spread else 0.0
