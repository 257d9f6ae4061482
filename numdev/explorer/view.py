"""Settings by their names on the command line, the point that they make, the command that measures it, and its results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from numdev.api import bench
from numdev.attention.captured import Captured
from numdev.attention.emulation import baseline_for
from numdev.attention.exact import Exact
from numdev.attention.groups import GROUPS
from numdev.attention.precision import Precision
from numdev.attention.problem import Distribution, Kind, Problem
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput, Unsupported, one_of
from numdev.results.record import Record, Status
from numdev.settings import Setting, declared, make

Settings = Mapping[str, Any]

CAPTURED = "captured"
SOURCES = (*(kind.value for kind in Kind), CAPTURED)
"""Where q, k and v come from, as `problem=` takes it."""

PRESETS = tuple(sorted(set(Precision.preset_names().values())))
"""The presets that are options of `precision=`; any other is `precision.preset=`."""

SHARED: Settings = {
    "problem": "uniform",
    "problem.n": 512,
    "precision": next(one.default for one in declared(Precision) if one.name == "preset"),
    "seeds": 3,
    "device": "cpu",
}
"""The defaults of a view."""

_SOURCE = "problem.source."
_POLICY = ("precision", "tiling", "softmax")  # the groups that say how attention is computed
KNOWN = {f"{group}.{one.name}": one for group, kind in GROUPS.items() for one in declared(kind)}
"""Settings by their names on the command line."""

_DEFAULTS = {name: one.default for name, one in KNOWN.items() if name.startswith(_POLICY)}
_DEFAULTS |= {"tiling.br": Tiling().br, "tiling.bc": Tiling().bc, "tiling.order": Tiling().order.value}  # which null stands for
_WORDS = {"inputs": "rounding of q, k, v"}  # which are inputs too where they are drawn
_KEPT = 64  # points that stay measured: a change of one policy measures nothing of the other again
_PLAIN = re.compile(r"[\w./@+-]+")  # what Hydra reads as text without quotes


def source_settings(name: str) -> list[Setting]:
    """The parameters of a source; raises BadInput if there is no such source."""
    if name not in SOURCES:
        raise BadInput("problem", name, one_of(name, SOURCES))
    return list(declared(Captured if name == CAPTURED else type(Distribution(Kind(name)))))


@dataclass(frozen=True)
class View:
    """One policy on one problem, as `View.of` makes it from settings; it keeps those that differ from their defaults, by name."""

    settings: Settings
    problem: Problem
    variant: Tiled

    @staticmethod
    def of(settings: Settings) -> View:
        """A view of these settings and of `SHARED`; null states nothing, and captured tensors bring the shape of one head.

        Raises BadInput for a setting that does not exist, and for a value that cannot be used.
        """
        explicit = {name: value for name, value in settings.items() if value is not None}
        every = {**SHARED, **explicit}
        kind = every["problem"]
        known = ("problem", "precision", "seeds", "device", *(_SOURCE + one.name for one in source_settings(str(kind))), *KNOWN)
        for name, value in explicit.items():
            if name not in known:
                raise BadInput(name, value, f"there is no such setting; {one_of(name, known, most=12)}")
        own = {name.removeprefix(_SOURCE): value for name, value in explicit.items() if name.startswith(_SOURCE)}
        source = Captured(**own) if kind == CAPTURED else Distribution(Kind(kind), **own)
        if isinstance(source, Captured):
            shape = source.shape
            sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
            sizes["n"] = min(shape.queries, shape.keys)
            every = {**SHARED, **{f"problem.{name}": size for name, size in sizes.items()}, **explicit}
        every["precision"] = every.pop("precision.preset", every["precision"])
        every = {name: value for name, value in every.items() if value != _DEFAULTS.get(name)}
        problem = make(Problem, {"source": source, **_arguments(every, "problem")}, "problem")
        steps = _arguments(every, "precision") | {"preset": every["precision"]}
        quantise = {name.partition(".")[2]: steps.pop(name) for name in list(steps) if "." in name}
        variant = Tiled(
            make(Precision, {**steps, "quantise": quantise}, "precision"),
            make(Tiling, {**_arguments(every, "tiling"), "head_dim": problem.shape.head_dim}, "tiling"),
            make(OnlineSoftmax, _arguments(every, "softmax"), "softmax"),
        )
        return View(every, problem, variant)

    @property
    def seeds(self) -> int:
        """How many replicates are measured."""
        return self.problem.replicates(self.settings["seeds"])

    @property
    def title(self) -> str:
        """The policy in words: its preset, and what differs from the defaults."""
        differs = (f"{word_of(KNOWN[name])} = {value}" for name, value in self._of(*_POLICY).items())
        return ", ".join([self.settings["precision"], *differs])

    @property
    def command(self) -> str:
        """The command line that measures this point."""
        preset = self.settings["precision"]
        # An option of `problem` has values of its own for some settings, so the command names all that is known of it.
        overrides = {"problem": self.settings["problem"], **self._of("problem")}
        overrides |= {"precision" if preset in PRESETS else "precision.preset": preset, **self._of(*_POLICY)}
        overrides |= {name: self.settings[name] for name in ("seeds", "device")}
        return shlex.join(["numdev", "measure", *(f"{name}={_written(value)}" for name, value in overrides.items())])

    def _of(self, *groups: str) -> dict[str, Any]:
        """The settings of some groups."""
        return {name: value for name, value in self.settings.items() if name.rpartition(".")[0].partition(".")[0] in groups}


def _arguments(settings: Settings, group: str) -> dict[str, Any]:
    """Every setting of a group; a default that refers to another one has its value."""
    own = {name: one for name, one in KNOWN.items() if name.partition(".")[0] == group}
    values = {one.name: settings.get(name, one.default) for name, one in own.items()}
    return {name: values[value[3:-1]] if str(value).startswith("${.") else value for name, value in values.items()}


def word_of(one: Setting) -> str:
    """A setting as a label has it."""
    return _WORDS.get(one.name) or one.word or one.name.replace("_", " ")


def _written(value: Any) -> str:
    """A value as Hydra reads it from a command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str) or _PLAIN.fullmatch(value):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@dataclass(frozen=True)
class Measured:
    """A record of all replicates; O of one head of one, `[queries, head_dim]`, and exact attention on its unrounded inputs."""

    record: Record
    out: Tensor
    golden: Tensor


def measured(view: View, seed: int) -> Measured:
    """A view measured, and O of its replicate `seed`; raises Unsupported where the measurement has no figures, and says why."""
    if not 0 <= seed < view.seeds:
        raise BadInput("seed", seed, f"give one of the {view.seeds} replicates that are measured, 0 to {view.seeds - 1}")
    record = _record(view.problem, view.variant, view.seeds, view.settings["device"])
    if record.status not in (Status.OK, Status.NONFINITE, Status.ZERO):
        raise Unsupported(record.status.value, record.reason)
    return Measured(record, *_replicate(view.problem, view.variant, seed))


@lru_cache(_KEPT)
def _record(problem: Problem, variant: Tiled, seeds: int, device: str) -> Record:
    return bench(device).measure(problem, variant, baseline_for(variant.format), seeds)


@lru_cache(_KEPT)
def _replicate(problem: Problem, variant: Tiled, seed: int) -> tuple[Tensor, Tensor]:
    """O of one head, and exact attention."""
    own = replace(variant, count=False).replicate(seed)  # the record has the counts, which take a third of a run
    q, k, v = problem.inputs(seed).values()
    exact = Exact()(q, k, v, problem.mask, problem.softmax_scale)
    q, k, v = own.round_inputs(q, k, v)
    return own(q, k, v, problem.mask, problem.softmax_scale).out[0, 0].double(), exact.out[0, 0]
