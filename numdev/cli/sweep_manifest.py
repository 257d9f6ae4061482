"""The overrides of a point that no study has, kept beside its record: reports know the axes of a sweep by it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from numdev.cli import launch, schema
from numdev.cli.compose import OPERATION, Request, plain_value, resolved, written
from numdev.cli.jobs import arguments, job_number
from numdev.cli.schema import PlotConfig
from numdev.results.manifest import manifest_of, stored_point
from numdev.results.store import Store

if TYPE_CHECKING:
    from numdev.cli.expand import Expander
    from numdev.measurement.runner import Kind, Runner
    from numdev.results.record import Record

_OF_THE_RUN = ("results", "out", "plot", "device", "fresh")  # not of what is measured: a report says where, and reads anywhere
_NO_SETTING = ("_target_", *(f"plot.{part.name}" for part in fields(PlotConfig)))


def keep(
    store: Store, program: str, cfg: DictConfig, expander: Expander, request: Request, measured: tuple[Runner, Record]
) -> str:
    """Write beside a record which sweep it is of, or that it is a single point, and what was stated of it; return its name.

    Args:
        store: that has the record.
        program: the command, such as `measure`.
        cfg: the composed configuration of the job.
        expander: with what the command line states of the point.
        request: what was asked for.
        measured: what measured the point, and its record.
    """
    bench, record = measured
    swept, settings = _swept(), {**expander.manner, **expander.task}
    labels = {name: settings.get(name, _value(cfg, name)) for name in swept} or settings
    fixed = {name: value for name, value in settings.items() if swept and name not in swept and name != "seeds"}
    name = _name(program, record, swept, fixed)
    title = _title(swept, fixed) if swept else f"Single points of {record.operation.replace('_', ' ')}"
    words = {each: schema.words(each) for each in dict.fromkeys([*labels, *fixed])} if swept else schema.all_words()
    values = {one: value for one, value in resolved(request.raw).items() if not one.endswith(_NO_SETTING)}
    point = stored_point(
        record.key,
        _plain(labels),
        number=job_number() if swept else store.count(name),
        command=_command(program),
        explicit=[*labels, *fixed],
        composed=_plain({**values, **request.options}),  # what a figure can be drawn over
    )
    meanings = {column.name: [column.unit, column.meaning] for column in bench.settings}
    store.put_point(manifest_of(name, record.kind, title, settings=meanings, words=words, swept=list(swept)), point)
    return name


def said_of_points(results: Path, measured: Kind) -> list[str]:
    """The overrides of the single points of an operation that a folder has."""
    manifest = Store(results).study(_of_points(measured.operation.name, measured.name)) or {"points": []}
    return list(dict.fromkeys(str(name) for point in manifest["points"] for name in point["explicit"]))


def _swept() -> tuple[str, ...]:
    """The names of what the command sweeps over; none where it is a single point."""
    hydra: Any = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN:
        return ()
    overrides = OverridesParser.create().parse_overrides(launch.read(arguments())[0])
    names = [one.key_or_group for one in overrides if one.is_sweep_override()]
    return tuple(dict.fromkeys([*names, *params_of(hydra)]))


def params_of(hydra: Any) -> list[str]:
    """The settings that a file, and not the command line, sweeps over."""
    params = OmegaConf.select(hydra, "sweeper.params")
    return [str(name) for name in params] if params else []


def _value(cfg: DictConfig, name: str) -> Any:
    """The value in a job of a swept name that is no setting of a point, such as `device`."""
    chosen = HydraConfig.get().runtime.choices.get(name)
    return plain_value(OmegaConf.select(cfg, name) if chosen is None else chosen)


def _name(program: str, record: Record, swept: Sequence[str], fixed: Mapping[str, Any]) -> str:
    """The name of a sweep, equal for all its jobs and runs: after its axes, and a hash of the settings that its points share."""
    if not swept:
        return _of_points(record.operation, record.kind)
    identity = json.dumps([program, _of(record.operation, record.kind), sorted(swept), sorted(fixed.items())], default=str)
    short = "_".join(dict.fromkeys(name.rpartition(".")[2].rpartition("/")[2] for name in swept))
    return f"sweep_{short}_{hashlib.sha256(identity.encode()).hexdigest()[:6]}"


def _of(operation: str, kind: str) -> str:
    return operation if kind == "deviation" else f"{operation}_{kind}"


def _of_points(operation: str, kind: str) -> str:
    """The name under which the single points of an operation are kept."""
    return f"points_{_of(operation, kind)}"


def _title(swept: Sequence[str], fixed: Mapping[str, Any]) -> str:
    """The title of a sweep: its axes in words, and the other overrides."""
    axes = [schema.words(name)[0] or name for name in swept]
    over = " and ".join([", ".join(axes[:-1]), axes[-1]] if axes[1:] else axes)
    beside = [f"{schema.words(name)[0] or name} = {written(value)}" for name, value in fixed.items() if name != OPERATION]
    return f"Sweep over {over}" + (f"; {', '.join(beside)}" if beside else "")


def _command(program: str) -> str:
    """The command line, without where results go and where it ran."""
    apart = set(_OF_THE_RUN).difference(_swept())
    return shlex.join(["numdev", program, *(text for text in arguments() if text.partition("=")[0].lstrip("+") not in apart)])


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them; a list is text, as on the command line."""
    scalar = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, scalar) else written(value) for name, value in values.items()}
