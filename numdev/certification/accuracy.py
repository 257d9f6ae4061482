"""The errors that a policy permits on a case, predicted once and kept on disk, and how those of a kernel compare.

Permitted is the largest error among the kernels of the declared policy: tiled attention in the usual tiles, in either order, with
and without lazy rescales, and with split keys. A ratio of 1 is that; its interval is Student's t over the seeds, in logarithms,
where kernel and prediction have the same inputs.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.certification.candidates import FORWARD, Candidate, Pass
from numdev.certification.cases import Case, Inputs
from numdev.certification.simulation import OF_KEYS, Layout, Outputs, Simulation
from numdev.results.environment import environment
from numdev.results.record import key_of, student_quantile, write_atomically

ABSURD = 1e9
"""The ratio of a result that is not finite, or not 0, where golden is."""
NOTHING = 2e-12
"""Ratios up to this are of results without an error."""
FIGURES = ("rmse", "largest", "bias")
LIMIT_OF_LARGEST = 2.0
"""Of the largest error and the bias, beside the margin of the RMSE: so much they differ between tiles of one policy."""
_LIMIT_OF_LSE = 2.0
# An LSE is a sum of a maximum and a logarithm, each rounded to FP32; this, relative to it, is what exp2 and log2 may add.
_LSE_FLOOR = 2.0**-19
_ROWS = 96  # of each head, in which predictions are kept
_FLOOR_OF_ZEROS = 30.0  # times the permitted error, so that four times that passes where golden is 0 throughout
_MOST_SEEDS = 1000
_MOST_BYTES = 1 << 32  # of all predictions that are kept
_PAGES = f"{'[0-9a-f]' * 32}.pt"  # names of their files
DECIDES = 3.0
"""Times the permitted error that zeros have to err, for a case to tell a kernel from zeros."""
Page = dict[str, Outputs]


def default_folder() -> Path:
    """Where predictions are kept: `numdev` in the user's folder of caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numdev" / "predictions"


@dataclass(frozen=True)
class Predictions:
    """Predictions of one declared policy, which serve every kernel.

    Attributes:
        precision: preset of the policy.
        head_dim: of the cases that do not have their own.
        folder: where they are kept; None keeps them in memory alone.
    """

    precision: str
    head_dim: int = 64
    folder: Path | None = field(default_factory=default_folder)
    of_pass: Pass = FORWARD

    @cached_property
    def policy(self) -> Any:
        return self.of_pass.policy(self.precision)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple({each.title: each for each in self.of_pass.catalogue(self.policy)}.values())

    @cached_property
    def _known(self) -> dict[str, Known]:
        return {}

    @cached_property
    def _pages(self) -> dict[str, tuple[Page, int]]:
        """By name, and how many predictions of each are on disk."""
        return {}

    def of(self, case: Case, seeds: range) -> Known:
        """What is known of some replicates of a case before any kernel runs."""
        name = f"{case.name} {seeds}"
        if name not in self._known:
            self._known[name] = self.on(name, case.draw(seeds, self.policy.output.to, self.head_dim))
        return self._known[name]

    def on(self, name: str, inputs: Inputs) -> Known:
        """Likewise of inputs that somebody has made."""
        return Known(self, name, self.of_pass.prepare(inputs, self.precision))

    def page(self, name: str) -> Page:
        """The predictions of a name, from disk where they were made before; to which more may be added."""
        if name not in self._pages:
            path = self._path(name)
            page: Page = torch.load(path, weights_only=True) if path is not None and path.is_file() else {}
            self._pages[name] = page, len(page)
        return self._pages[name][0]

    def save(self) -> None:
        """Keep new predictions for other kernels; the oldest go where all exceed 4 GiB."""
        for name, (page, saved) in self._pages.items():
            path, data = self._path(name), io.BytesIO()
            if path is not None and len(page) > saved:
                torch.save(page, data)
                write_atomically(path, data.getvalue())
                self._pages[name] = page, len(page)
        room = _MOST_BYTES
        with suppress(OSError):  # another process may remove them too
            for path in sorted(self.folder.glob(_PAGES) if self.folder else (), key=lambda each: -each.stat().st_mtime):
                room -= path.stat().st_size
                if room < 0:
                    path.unlink()

    def _path(self, name: str) -> Path | None:
        config = {"policy": str(self.policy), "head_dim": self.head_dim, "name": name}
        return self.folder and self.folder / f"{key_of(config, self._facts)}.pt"

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return environment(torch.device("cpu")) | {"threads": "1"}  # of the libraries whose sums the predictions have


@dataclass(frozen=True)
class Known:
    """Some replicates of a case: inputs, golden, and predictions; `whole` is what they are the first replicate of."""

    predictions: Predictions
    name: str
    inputs: Inputs
    whole: Known | None = None

    @cached_property
    def first(self) -> Known:
        """Of the first replicate alone."""
        return self if self.inputs.replicates == 1 else Known(self.predictions, f"first of {self.name}", self.inputs.first, self)

    def of_first(self, outputs: Outputs) -> Outputs:
        """Those of the first replicate."""
        return {name: x[: len(x) // self.inputs.replicates].float() for name, x in outputs.items()}

    @cached_property
    def golden(self) -> Outputs:
        """The exact outputs of the rounded inputs, in FP64."""
        golden = self.predictions.of_pass.golden(self.inputs)
        return {name: golden[name] for name in self.predictions.of_pass.outputs}

    @cached_property
    def exact(self) -> Outputs:
        """Those of golden that a kernel is compared with; see `rows`."""
        return self.rows(self.golden)

    def rows(self, outputs: Outputs) -> Outputs:
        """The queries that see a key, and every key, `[replicates, numbers]` in FP64; what others hold is for a probe to say."""
        q = self.inputs.tensors["q"]
        seen = self.inputs.mask.seeing_rows(len(q), *self.inputs.sizes)[:, None].expand(q.shape[:-1])
        few = some_rows({"q": seen})["q"]
        rows = {name: x if name in OF_KEYS else x[seen if x.shape[2] == seen.shape[2] else few] for name, x in outputs.items()}
        return {name: x.double().reshape(self.inputs.replicates, -1) for name, x in rows.items()}

    def predict(self, candidate: Candidate, layout: Layout, of_kernel: Outputs) -> Outputs:
        """Some rows of the outputs of a candidate, in the dtypes that hold their formats; see `Simulation`."""
        page = self.predictions.page(f"{self.name} {layout!r}")
        if candidate.title in page and not candidate.fitted:  # one that is fitted may have the title of another
            return page[candidate.title]
        simulation = Simulation(self.inputs, self.predictions.policy, layout, candidate.changes, of_kernel)
        whole, dtype = self.predictions.of_pass.simulated(simulation), self.inputs.tensors["q"].dtype
        predicted = {name: x.float() if name == "lse" else x.to(dtype) for name, x in some_rows(whole).items()}
        if not candidate.fitted:
            page[candidate.title] = predicted
        return predicted

    @cached_property
    def permitted(self) -> dict[str, Tensor]:
        """The largest `FIGURES` of each output among the kernels of the policy, `[replicates, figures]`."""
        if self.whole is not None:
            return {name: x[:1] for name, x in self.whole.permitted.items()}
        page, of_pass = self.predictions.page(f"{self.name} permitted"), self.predictions.of_pass
        if not page:
            emulated = [of_pass.emulated(self.inputs, self.predictions.policy, layout) for layout in of_pass.usual]
            family = [self.rows(each) for each in emulated]
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

    def ratios(self, outputs: Outputs) -> dict[str, Tensor]:
        """The figures of each output over the permitted ones, `[replicates, figures]`; 1 of two that are 0."""
        ratios = {}
        for name, x in self.rows(outputs).items():
            own, most = figures(x - self.exact[name]) + self.floors[name], self.permitted[name] + self.floors[name]
            ratios[name] = torch.where(own == most, 1.0, own / most).clamp(max=ABSURD)
        return ratios

    @property
    def zeros(self) -> float:
        """How many times the permitted error a kernel that returns zeros has."""
        name = self.predictions.of_pass.outputs[0]
        zeros = self.ratios({name: torch.zeros_like(self.golden[name])})
        return float(zeros[name][:, 0].mean())


def some_rows(outputs: Outputs) -> Outputs:
    """At most `_ROWS` tokens, evenly spread, by which candidates are told apart."""
    return {name: x[:, :, :: math.ceil(x.shape[2] / _ROWS)].contiguous() for name, x in outputs.items()}


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


def judge(ratios: Mapping[str, Tensor], margin: float) -> list[Judged]:
    """Every figure of a case: FAIL where its interval lies above the limit, PASS below it, else the seeds that would decide."""
    judged = []
    for output, figure in product(ratios, FIGURES):
        if output == "lse" and figure != "rmse":
            continue
        limit = _LIMIT_OF_LSE if output == "lse" else margin if figure == "rmse" else LIMIT_OF_LARGEST * margin
        own = ratios[output][:, FIGURES.index(figure)]
        logs, count, needed = own.clamp(min=NOTHING / 2).log(), len(own), 0
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
