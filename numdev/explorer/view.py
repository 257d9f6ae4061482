"""Settings by their names on the command line, the point that they make, the command that measures it, and its results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from numdev.api import bench
from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.emulation import baseline_for
from numdev.attention.exact import Exact
from numdev.attention.groups import GROUPS
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Source
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
_DEFAULTS = {f"{group}.{one.name}": one.default for group in _POLICY for one in declared(GROUPS[group])}
_DEFAULTS |= {"tiling.br": Tiling().br, "tiling.bc": Tiling().bc, "tiling.order": Tiling().order.value}  # which null stands for
_WORDS = {"inputs": "rounding of q, k, v"}  # which are inputs too where they are drawn
_KEPT = 64  # points that stay measured: a change of one policy measures nothing of the other again
_PLAIN = re.compile(r"[\w./@+-]+")  # what Hydra reads as text without quotes


def source_settings(name: str) -> list[Setting]:
    """The parameters of a source.

    Raises:
        BadInput: if there is no such source.
    """
    if name not in SOURCES:
        raise BadInput("problem", name, one_of(name, SOURCES))
    return list(declared(Captured if name == CAPTURED else type(Distribution(Kind(name)))))


@dataclass(frozen=True)
class View:
    """One policy on one problem, as `View.of` makes it from settings.

    Attributes:
        settings: those that differ from their defaults, by name, as the command line takes them.
        problem: what is measured on.
        variant: tiled attention under the policy.
    """

    settings: Settings
    problem: Problem
    variant: Tiled

    @staticmethod
    def of(settings: Settings) -> View:
        """A view of these settings and of `SHARED`; null states nothing, and captured tensors bring the shape of one head.

        Raises:
            BadInput: for a setting that does not exist, and for a value that cannot be used.
        """
        explicit = {name: value for name, value in settings.items() if value is not None}
        known = list(_names(str(explicit.get("problem", SHARED["problem"]))))
        for name, value in explicit.items():
            if name not in known:
                raise BadInput(name, value, f"there is no such setting; {one_of(name, known, most=12)}")
        source = _source({**SHARED, **explicit})
        every = {**SHARED, **(_head(source) if isinstance(source, Captured) else {}), **explicit}
        every["precision"] = every.pop("precision.preset", every["precision"])
        every = {name: value for name, value in every.items() if value != _DEFAULTS.get(name)}
        problem = make(Problem, {"source": source, **_arguments(every, "problem")}, "problem")
        return View(every, problem, _variant(every, problem.shape.head_dim))

    @property
    def seeds(self) -> int:
        """How many replicates are measured."""
        return self.problem.replicates(self.settings["seeds"])

    @property
    def title(self) -> str:
        """The policy in words: its preset, and what differs from the defaults."""
        words = {f"{group}.{one.name}": word_of(one) for group in _POLICY for one in declared(GROUPS[group])}
        return ", ".join(
            [self.settings["precision"], *(f"{words[name]} = {value}" for name, value in self._of(*_POLICY).items())]
        )

    @property
    def command(self) -> str:
        """The command line that measures this point."""
        preset = self.settings["precision"]
        # An option of `problem` has values of its own for some settings, so the command names all that is known of it.
        overrides = {"problem": self.settings["problem"], **self._of("problem")}
        overrides |= {"precision" if preset in PRESETS else "precision.preset": preset, **self._of(*_POLICY)}
        overrides |= {name: self.settings[name] for name in ("seeds", "device")}
        return shlex.join(["numdev", "measure", *(f"{name}={_written(value)}" for name, value in overrides.items())])

    @property
    def key(self) -> str:
        """The key of its record."""
        return bench(self.settings["device"]).key(self.problem, self.variant, baseline_for(self.variant.format), self.seeds)

    def _of(self, *groups: str) -> dict[str, Any]:
        """The settings of some groups."""
        return {name: value for name, value in self.settings.items() if name.rpartition(".")[0].partition(".")[0] in groups}


def _source(settings: Settings) -> Source:
    """Where q, k and v come from."""
    own = {name.removeprefix(_SOURCE): value for name, value in settings.items() if name.startswith(_SOURCE)}
    name = settings["problem"]
    return Captured(**own) if name == CAPTURED else Distribution(Kind(name), **own)


def _head(source: Captured) -> dict[str, Any]:
    """The settings of one head of captured tensors."""
    shape = source.shape
    sizes = {"n": min(shape.queries, shape.keys), "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return {f"problem.{name}": size for name, size in sizes.items()}


def _variant(settings: Settings, head_dim: int) -> Tiled:
    steps = _arguments(settings, "precision") | {"preset": settings["precision"]}
    quantise = {name.partition(".")[2]: steps.pop(name) for name in list(steps) if "." in name}
    return Tiled(
        make(Precision, {**steps, "quantise": quantise}, "precision"),
        make(Tiling, {**_arguments(settings, "tiling"), "head_dim": head_dim}, "tiling"),
        make(OnlineSoftmax, _arguments(settings, "softmax"), "softmax"),
    )


def _arguments(settings: Settings, group: str) -> dict[str, Any]:
    """Every setting of a group; a default that refers to another one has its value."""
    values = {one.name: settings.get(f"{group}.{one.name}", one.default) for one in declared(GROUPS[group])}
    return {name: values[value[3:-1]] if str(value).startswith("${.") else value for name, value in values.items()}


def _names(source: str) -> Iterator[str]:
    """Every setting that a view with inputs from this source may have."""
    yield from ("problem", "precision", "seeds", "device")
    yield from (f"{_SOURCE}{one.name}" for one in source_settings(source))
    for group, kind in GROUPS.items():
        yield from (f"{group}.{one.name}" for one in declared(kind))


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
    """One view measured.

    Attributes:
        record: of all replicates.
        out: O of one head of one replicate, `[queries, head_dim]`.
        golden: exact attention on the unrounded inputs of the same.
    """

    record: Record
    out: Tensor
    golden: Tensor


def measured(view: View, seed: int) -> Measured:
    """A view measured, and O of its replicate `seed`.

    Raises:
        BadInput: for settings that cannot be used.
        Unsupported: where the measurement has no figures; it says why.
    """
    if not 0 <= seed < view.seeds:
        raise BadInput("seed", seed, f"give one of the {view.seeds} replicates that are measured, 0 to {view.seeds - 1}")
    record = _record(view.problem, view.variant, view.seeds, view.settings["device"])
    if record.status not in (Status.OK, Status.NONFINITE, Status.ZERO):
        raise Unsupported(record.status.value, record.reason)
    return Measured(record, _out(view.problem, view.variant, seed), _golden(view.problem, seed))


@lru_cache(_KEPT)
def _record(problem: Problem, variant: Tiled, seeds: int, device: str) -> Record:
    return bench(device).measure(problem, variant, baseline_for(variant.format), seeds)


@lru_cache(_KEPT)
def _out(problem: Problem, variant: Tiled, seed: int) -> Tensor:
    own = replace(variant, count=False).replicate(seed)  # the record has the counts, which take a third of a run
    q, k, v = own.round_inputs(*problem.inputs(seed).values())
    return own(q, k, v, problem.mask, problem.softmax_scale).out[0, 0].double()


@lru_cache(8)
def _golden(problem: Problem, seed: int) -> Tensor:
    q, k, v = problem.inputs(seed).values()
    return Exact()(q, k, v, problem.mask, problem.softmax_scale).out[0, 0]
