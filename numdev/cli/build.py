"""From settings to objects: a point, whose explicit settings are all read or refused by name, and the runner that measures it.

A class that declares `accepted_settings` lists the settings that it reads; any other class reads the arguments of its own node,
and what they refer to. What cannot be used is a BadInput that names the setting as the command line does; what is stated and read
by nothing that would be measured is NotHonoured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from numdev.attention.base import Implementation
from numdev.attention.groups import AcceptedSettings
from numdev.cli import schema
from numdev.cli.compose import OPERATION, Flat, Request, at, plain, reference
from numdev.errors import BadInput, NotHonoured
from numdev.measurement.deviation import Deviations
from numdev.measurement.invariance import KIND, Invariances
from numdev.measurement.operation import Operation, Rule
from numdev.measurement.runner import Kind, Runner
from numdev.measurement.speed import Budget, Speeds
from numdev.results.study import Refused, StudyPoint
from numdev.settings import make, types_of
from numdev.training.rung import Rung

TARGET = "_target_"


def point(request: Request, scenario: str = "default", labels: Mapping[str, Any] | None = None) -> StudyPoint:
    """The point of a whole configuration."""
    _refuse(request, _unread(request))
    seeds = _seeds(request.config)
    try:
        variant, problem, baseline = _parts(request)
        return StudyPoint(problem, variant, baseline, problem.replicates(seeds), scenario, dict(labels or {}))
    except BadInput as error:
        field = _place(request.raw, error.field)  # of what refers to another setting, as problem.queries to problem.n
        raise error if type(error) is not BadInput else BadInput(field, error.value, error.hint) from None


def _parts(request: Request) -> tuple[Any, Any, Any]:
    """Variant, problem and baseline."""
    config, raw = request.config, request.raw
    variant, problem = node(config, "variant", raw), node(config, "problem", raw)
    if variant is config["variant"]:
        raise BadInput("variant", variant, "it names no object; leave it out, and choose an option, as in attention=tiled")
    _refuse(request, _without_effect(request, variant, problem))
    baseline = node(config, "baseline", raw)
    if isinstance(baseline, Rule):
        kind = types_of(type(baseline).of).get("problem", Any)  # options of every operation lie in one group
        if kind is not Any and not isinstance(problem, kind):
            hint = f"it is not a baseline for problems of {type(problem).__module__}; choose one of the operation"
            raise BadInput("baseline", request.options.get("baseline", type(baseline).__name__), hint)
        baseline = baseline.of(variant, problem)
    _refuse(request, _ineffective(baseline, problem))
    return variant, problem, baseline


def replicated(point: StudyPoint) -> list[StudyPoint]:
    """A point for each replicate of a training run, so that processes share rungs times seeds; any other point as it is."""
    if not isinstance(point.variant, Rung):
        return [point]

    def alone(seed: int) -> StudyPoint:
        variant, baseline = (replace(rung, seed=seed) for rung in (point.variant, point.baseline))
        return replace(point, variant=variant, baseline=baseline, seeds=1, replicate=seed)

    return [alone(point.variant.seed + further) for further in range(point.seeds)]


def refused_point(request: Request, scenario: str, labels: Mapping[str, Any], reason: str) -> StudyPoint:
    """The place of a point that cannot be measured as it is stated."""
    text = " ".join(dict.fromkeys([*map(str, request.said.values()), *(f"{name}={label}" for name, label in labels.items())]))
    variant, problem = Refused(kind_of(request).rpartition("=")[2], text), node(request.config, "problem", request.raw)
    return StudyPoint(problem, variant, None, problem.replicates(_seeds(request.config)), scenario, dict(labels), reason)


def _seeds(config: Mapping[str, Any]) -> int | None:
    seeds: int | None = config["seeds"]
    if seeds is not None and (not isinstance(seeds, int) or seeds < 1):
        raise BadInput("seeds", seeds, "give the number of replicates, at least 1")
    return seeds


def node(config: Mapping[str, Any], path: str, raw: Flat | None = None) -> Any:
    """The object of a node of a resolved configuration, with those of the nodes in it; one without `_target_` is its value.

    `raw` has the settings as they are written, so that errors name the setting that a reference leads to.
    """
    value, where = at(config, path), _place(raw or {}, path)
    if not isinstance(value, Mapping) or TARGET not in value:
        return value
    own = {name: node(config, f"{path}.{name}", raw) for name in value if not name.startswith("_")}
    try:
        return make(located(value[TARGET]), own, where)
    except InstantiationException as error:
        raise BadInput(f"{where}.{TARGET}", value[TARGET], " ".join(str(error).split())) from None


@lru_cache(maxsize=256)
def located(name: str) -> Any:
    """The class or function of a `_target_`."""
    return instantiate({TARGET: name, "_partial_": True}).func  # `get_object` logs an error before it raises it


def made_by(name: str) -> type | None:
    """The class of the object that a `_target_` makes, if it is known."""
    target = located(name)
    kind = target if isinstance(target, type) else types_of(target).get("return")
    return kind if isinstance(kind, type) else None


def kind_of(request: Request) -> str:
    """The measured option, such as `attention=sdpa`; the name of the class for a variant that is not an option of a group."""
    place = _implementation(request.raw)
    if place in request.options:
        return f"{place}={request.options[place]}"
    return str(request.raw[f"{place}.{TARGET}"]).rpartition(".")[2]


def reads(request: Request) -> frozenset[str]:
    """Every setting that the point of a request reads, and the nodes that hold it: an option may state its group alone."""
    variant = _place(request.raw, "variant")
    of_nodes = (accepted_by(request.raw, path).names for path in (variant, "problem", "baseline"))
    read = frozenset({"seeds", variant, "problem", "baseline"}).union(*of_nodes)
    return read | {name.rpartition(".")[0] for name in read}


def accepted_by(raw: Flat, path: str) -> AcceptedSettings:
    """The settings that a node reads: those that its class declares.

    A class that declares none reads the arguments of its node and of those in it, and the settings that they refer to, directly
    or through another node.
    """
    if (own := _declared_by(raw, path)) is not None:
        return own
    names, waiting = set[str](), [path]
    while waiting:
        prefix = waiting.pop()
        if (declared := _declared_by(raw, prefix)) is not None:
            names |= {prefix, *declared.names}
            continue
        for name, value in raw.items():
            if (name == prefix or name.startswith(f"{prefix}.")) and name not in names and "._" not in name:
                names.add(name)
                waiting += filter(None, [reference(value, name)])
    return AcceptedSettings(frozenset(names))


def _declared_by(raw: Flat, path: str) -> AcceptedSettings | None:
    """The declaration of the class of a node's object; None if it is not a node, or its class declares nothing."""
    name = raw.get(f"{path}.{TARGET}")
    declared = getattr(made_by(name), "accepted_settings", None) if name else None
    return declared if isinstance(declared, AcceptedSettings) else None  # of another operation a class need not have it


def _place(raw: Flat, path: str) -> str:
    """The name by which a node, or a setting in it, is set: that to which the references on its path lead."""
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        own = ".".join(parts[:i])
        if (target := reference(raw.get(own), own)) is not None:
            return _place(raw, ".".join([target, *parts[i:]]))
    return path


def _implementation(raw: Flat) -> str:
    """The node within the variant whose class declares what it accepts; otherwise the node of the variant."""
    variant = _place(raw, "variant")
    held = (reference(value, name) for name, value in raw.items() if name.startswith(f"{variant}."))
    return next((name for name in held if name is not None and _declared_by(raw, name) is not None), variant)


def _refuse(request: Request, reasons: Iterable[tuple[str, str]]) -> None:
    """Raise NotHonoured for the first of these settings that is explicit, naming it or the option that states it."""
    for name, why in reasons:
        if name in request.said:
            raise NotHonoured(request.said[name].name, request.said[name].value, why)


def _unread(request: Request) -> Iterator[tuple[str, str]]:
    """The explicit settings that nothing reads, and those that others override completely."""
    said, raw, read, composer = request.said, request.raw, reads(request), request.composer
    for first, *others in filter(None, [[name for name in said if name not in read]]):
        group, option, also = _implementation(raw), kind_of(request), "".join(f", nor {name}" for name in others)
        declared = {one: _declared_by(composer.leaf(group, one), group) for one in composer.options(group)}
        able = [one for one, settings in declared.items() if settings and settings.names >= {first, *others}]
        if first not in raw:  # only other options of its group have it
            group, also, able = first.partition(".")[0], "", composer.options_with(first)
            option = f"{group}={request.options[group]}"
        why = accepted_by(raw, group).refusal(first, option)
        hint = f"leave {'them' if also else 'it'} out" + (f", or take {group}={' or '.join(able)}" if able else "")
        yield first, why or f"{option} does not read {_called(request, first)}{also}; {hint}"
    own = {name: one for name, one in said.items() if one.name == name}  # not by the file of an option, which values override
    for name, one in schema.settings().items():
        by = {f"{name.partition('.')[0]}.{other}": value for other, value in (one.overruled or {}).items()}
        if by and name in own and all(other in own and value in (None, raw[other]) for other, value in by.items()):
            yield name, f"{' and '.join(str(said[other]) for other in by)} overrides it completely; leave it out"


def _called(request: Request, name: str) -> str:
    return "it" if request.said[name].name == name else f"{name}, which it states"


def _without_effect(request: Request, variant: Any, problem: Any) -> Iterator[tuple[str, str]]:
    """The settings that a variant reads under another setting alone, and those whose values change nothing on the problem."""
    is_whole = isinstance(variant, Implementation) or not is_dataclass(variant)  # else it holds the one that says what it reads
    for part in [variant] if is_whole else [getattr(variant, field.name) for field in fields(variant)]:
        for name, reader in part.idle.items() if isinstance(part, Implementation) else ():
            if name in request.said:
                called = _called(request, name)
                yield name, f"{kind_of(request)} reads {called} only with {reader}; leave it out, or give {reader} too"
        yield from _ineffective(part, problem)


def _ineffective(made: Any, problem: Any) -> Iterator[tuple[str, str]]:
    for error in made.ineffective(getattr(problem, "shape", None)) if isinstance(made, Implementation) else ():
        yield error.field, error.hint


def operation_of(settings: Mapping[str, Any] | None) -> Operation:
    """The operation that a node makes."""
    operation = node({OPERATION: settings}, OPERATION)
    if isinstance(operation, Operation):
        return operation
    raise BadInput(OPERATION, settings, "it makes no numdev.measurement.operation.Operation; give operation=NAME, an option")


def runner(command: str, cfg: DictConfig, of_operation: Mapping[str, Any] | None = None) -> Runner:
    """The runner of a command on the configuration's device, kept so that golden results serve the next job of a sweep too."""
    operation = operation_of(of_operation or (cfg.get(OPERATION) and plain(cfg.operation, resolve=True)))
    if (command == "train") is (operation.golden is not None):
        trains = "it has no exact result, its runs are compared with one another; use numdev train"
        hint = f"numdev train compares runs of training; numdev measure measures {operation.name}"
        raise BadInput(OPERATION, operation.name, trains if operation.golden is None else hint)
    of_kind: Any = kind(command, operation, plain(cfg.timing) if command == "speed" else {})  # its base is no dataclass to mypy
    return _runner(of_kind, cfg.device)


_runner = lru_cache(maxsize=2)(Runner)


def kind(command: str, operation: Operation, timing: Mapping[str, Any] | None = None) -> Kind:
    """The kind of measurement of a command: `speed`, `train`, `certify` or `invariance`; every other measures deviations."""
    if operation.name == "mismatch":
        from numdev.training.mismatch import Mismatches  # late: it imports every model

        if command not in ("measure", Mismatches.name):
            raise BadInput(OPERATION, operation.name, "numdev measure measures it")
        return Mismatches(operation)
    if operation.golden is None:
        from numdev.training.weights import WeightsOverTraining  # late: it imports every attention and every model

        return WeightsOverTraining(operation)
    if command == "certify":
        from numdev.certification.certificate import Certificates  # late: it imports every kernel

        return Certificates(operation)
    if command == KIND:
        return Invariances(operation)
    return Speeds(operation, make(Budget, timing or {}, "timing")) if command == "speed" else Deviations(operation)
