"""Golden values and predictions of cases, computed once and kept in memory and on disk, for every kernel that is certified."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from numdev.arithmetic.formats import Format
from numdev.attention.exact import Exact
from numdev.attention.precision import Precision
from numdev.attention.tiling import Tiling
from numdev.certification.cases import Case, Inputs
from numdev.certification.catalogue import DECLARED, LAZY, PLAIN, SPLIT, USUAL, WIDE, Candidate, Outputs, catalogue
from numdev.certification.faults import structural
from numdev.results.record import write_atomically
from numdev.sources import digest

Page = dict[str, Outputs]


def default_folder() -> Path:
    """Where predictions are kept: `numdev` in the user's folder of caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numdev" / "predictions"


@dataclass(frozen=True)
class Predictions:
    """Predictions of one declared policy.

    Attributes:
        policy: the declared one.
        head_dim: of the cases that do not have their own.
        folder: where they are kept; None keeps them in memory alone.
    """

    policy: Precision
    head_dim: int = 64
    folder: Path | None = field(default_factory=default_folder)

    @cached_property
    def _known(self) -> dict[tuple[str, int], Known]:
        return {}

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return catalogue(self.policy)

    @property
    def formats(self) -> dict[str, Format]:
        """Of the outputs, for their ulp."""
        return {"out": self.policy.output.to, "lse": self.policy.row_sum.accumulate.to}

    def of(self, case: Case, seed: int) -> Known:
        """What is known of a case before any kernel runs."""
        key = case.name, seed
        if key not in self._known:
            self._known[key] = Known(self, case, seed)
        return self._known[key]

    def kept(self, name: str, make: Callable[[], Page]) -> Page:
        """A page of predictions, from disk where it was made before."""
        if self.folder is None:
            return make()
        text = f"{digest()} {torch.__version__} {self.policy} {self.head_dim} {name}"
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.pt"
        if path.is_file():
            known: Page = torch.load(path, weights_only=True)
            return known
        page, data = make(), io.BytesIO()
        torch.save(page, data)
        write_atomically(path, data.getvalue())
        return page


@dataclass(frozen=True)
class Known:
    """A replicate of a case: inputs, golden, and predictions."""

    predictions: Predictions
    case: Case
    seed: int

    @cached_property
    def inputs(self) -> Inputs:
        return self.case.draw(self.seed, self.predictions.policy.output.to, self.predictions.head_dim)

    @cached_property
    def golden(self) -> Outputs:
        """Exact attention on the rounded inputs, in FP64."""
        return Exact()(*self.inputs.qkv, self.inputs.mask, self.inputs.scale).tensors()

    def rows(self, outputs: Outputs) -> Outputs:
        """The rows that see a key, `[rows, values]` and `[rows]`, in FP64; what others hold is for a probe to say."""
        seen = self.golden["lse"].isfinite()
        return {name: x[seen].double() for name, x in outputs.items()}

    @cached_property
    def family(self) -> Page:
        """What kernels of the declared policy return: usual tiles in both orders, with and without lazy rescales, and splits."""

        def make() -> Page:
            policy = self.predictions.policy
            plain, lazy = (Candidate(DECLARED, "", policy, softmax) for softmax in (PLAIN, LAZY))
            runs = [(plain, tiling) for tiling in (*USUAL, SPLIT[4])] + [(lazy, tiling) for tiling in USUAL]
            return {f"{i}": _floats(each.predict(self.inputs, tiling)) for i, (each, tiling) in enumerate(runs)}

        return self.predictions.kept(f"family {self.case} {self.seed}", make)

    @cached_property
    def declared(self) -> Page:
        """The declared policy in many tiles, orders and splits, with and without lazy rescales, by their names."""

        def make() -> Page:
            plain, lazy = (Candidate(DECLARED, "", self.predictions.policy, softmax) for softmax in (PLAIN, LAZY))
            runs = {name: plain.predict(self.inputs, tiling) for name, tiling in LAYOUTS.items()}
            runs |= {layout(tiling) + _LAZILY: lazy.predict(self.inputs, tiling) for tiling in WIDE}
            return {name: _floats(outputs) for name, outputs in runs.items()}

        return self.predictions.kept(f"declared {self.case} {self.seed}", make)

    def catalogue(self, tiling: Tiling) -> Page:
        """Every candidate, and every fault that changes these inputs, in some tiles."""

        def make() -> Page:
            page = {each.name: _floats(each.predict(self.inputs, tiling)) for each in self.predictions.candidates}
            base = page[DECLARED]
            for name, outputs in structural(self.inputs, tiling):
                more = {key: (outputs[key] - self.golden[key]).nan_to_num(0.0, 0.0, 0.0) for key in outputs}
                page[name] = _floats({key: base[key] + more[key] for key in base})
            return page

        return self.predictions.kept(f"catalogue {self.case} {self.seed} {tiling}", make)


def layout(tiling: Tiling) -> str:
    """Tiles in words: `tiles of 128 keys, reverse`."""
    return f"tiles of {tiling.bc} keys, {tiling.order.value if tiling.splits == 1 else f'{tiling.splits} splits'}"


LAYOUTS = {layout(tiling): tiling for tiling in (*WIDE, *SPLIT)}
"""The tiles by which those of a kernel are looked for, by their words."""
_LAZILY = ", lazy rescales"


def _floats(outputs: Outputs) -> Outputs:
    """In FP32, which holds every output of 16 bits, and an LSE to the accuracy with which kernels return it."""
    return {name: x.float() for name, x in outputs.items()}
