"""Tables that pages take from the code and from `configs/`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "reports" / "reference"
GROUPS = ("problem", "precision", "tiling", "softmax", "attention", "backward", "baseline", "task")


def escaped(text: str) -> str:
    """A sentence as Markdown: names in backticks are code, a power is one, and no other sign means anything."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without another
        parts = [text]
    plain = (powers(re.sub(r"([\\`*_\[\]<>|])", r"\\\1", part)) for part in parts[::2])
    code = [f"`{part}`" for part in parts[1::2]]
    return "".join(part for pair in zip(plain, [*code, ""], strict=True) for part in pair)


def powers(text: str) -> str:
    """Exponents set as such, as of N^0.58."""
    return re.sub(r"\b(\w+)\^(-?\d[\d.]*(?:e-?\d+)?)", r"\1<sup>\2</sup>", text)


def cell(text: str) -> str:
    """Markdown as a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\|", text)


@lru_cache(maxsize=1)
def studies() -> dict[str, dict[str, Any]]:
    """The fields of every study, by name."""
    from numdev.cli.compose import composer
    from numdev.sources import config_folder

    own = composer((config_folder(),))
    return {name: own.study(name) for name in own.options("study")}


def study_table() -> Iterator[str]:
    """Names and titles."""
    yield from ("| study | title |", "|---|---|")
    yield from (f"| `{name}` | {cell(study['title'])} |" for name, study in studies().items())


_PARTS = {
    "problem": "what is measured on",
    "precision": "the format of each step",
    "tiling": "which tiles of K and V, in which order",
    "softmax": "the online recurrence",
    "": "replicates, device, results and sweeps",
}
_OF_TABLE = ("| setting | default | unit | meaning |", "|---|---|---|---|")


def settings() -> Iterator[str]:
    """Every setting of the groups and of the run: its default, unit and sentence, where it is declared."""
    from numdev.attention.groups import BACKWARD_GROUPS
    from numdev.attention.groups import GROUPS as TYPED
    from numdev.cli.schema import RunConfig
    from numdev.settings import declared
    from numdev.training.rung import GROUPS as TRAINING

    for group, kind in {**TYPED, "": RunConfig}.items():
        yield from ("", f"### {group or 'the run'}: {_PARTS[group]}", "", *_OF_TABLE)
        yield from (_setting(f"{group}.{one.name}".lstrip("."), one) for one in declared(kind))
    yield from ("", "### Settings that one option has", "", *_OF_TABLE, *_of_options())
    known = {(group, one.name, one.text) for group, kind in TYPED.items() for one in declared(kind)}
    for title, groups in (("operation=attention_backward", BACKWARD_GROUPS), ("numdev train", TRAINING)):
        yield from ("", f"### What {title} has of its own", "", *_OF_TABLE)
        for group, kind in groups.items():
            for one in declared(kind):
                if (group, one.name, one.text) not in known:
                    known.add((group, one.name, one.text))
                    yield _setting(f"{group}.{one.name}", one)


def _setting(name: str, one: Any, of: str = "", default: object = MISSING) -> str:
    shown = _stated(one.default if default is MISSING else default)
    return f"| `{name}` | `{shown}` | {one.unit} | {of}{cell(escaped(one.text))} |"


def _of_options() -> Iterator[str]:
    """The settings that an option alone has."""
    from numdev.attention.groups import preset, presets
    from numdev.cli import build
    from numdev.settings import declared

    known = set()
    for group in ("problem", "attention", "backward", "baseline", "task"):
        files = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs" / group).glob("*.yaml")}
        for option, leaf in sorted((files | {option: preset(group, option) for option in presets(group)}).items()):
            inner = {f"{group}.{name}": leaf[name] for name in ("source", "data") if name in leaf}
            for name, node in (inner if "source" in leaf else {group: leaf} | inner).items():
                kind = build.made_by(node["_target_"])
                for one in declared(kind) if kind else ():
                    if one.name in node and (name, one.name, option) not in known:
                        known.add((name, one.name, option))
                        yield _setting(f"{name}.{one.name}", one, f"`{group}={option}`: ", node[one.name])


def _stated(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def honoured() -> Iterator[str]:
    """The settings that each variant and each baseline reads, a group's name with a star for all of its settings."""
    from numdev.cli.build import accepted_by
    from numdev.cli.compose import Composer, composer
    from numdev.sources import config_folder

    def told(known: Composer, honoured: frozenset[str], family: str = "") -> str:
        groups = dict.fromkeys((*GROUPS, "forward_precision", "recompute"))
        of_group = {group: {name for name in known.known() if name.startswith(f"{group}.")} for group in groups}
        told = [f"`precision=FORMAT` or `{family}_FORMAT`"] if family else []
        for group, names in of_group.items():
            read, lacking = sorted(names & honoured - ({"precision.preset"} if family else set())), sorted(names - honoured)
            if len(lacking) < min(2, len(read)):
                told.append(f"`{group}.*`" + "".join(f" but `{name}`" for name in lacking))
            else:
                told += [f"`{name}`" for name in read]
        return ", ".join(told) or "nothing more"

    yield from ("| | reads |", "|---|---|")
    for operation, group in (("attention", "attention"), ("attention_backward", "backward"), ("attention", "baseline")):
        known = composer((config_folder(),), operation=operation)
        for option in known.options(group):
            accepted = accepted_by(known.values({group: option}), group)
            yield f"| `{group}={option}` | {told(known, accepted.names, accepted.family)} |"


def commands() -> Iterator[str]:
    """What the other commands add to the settings of the run."""
    from numdev.cli import schema
    from numdev.settings import declared

    kinds = {
        "map": schema.MappedConfig,
        "paper": schema.StudiesConfig,
        "report": schema.ReportConfig,
        "speed": schema.TimedConfig,
        "train": schema.TrainedConfig,
    }
    run = {one.name: one for one in declared(schema.RunConfig)}
    for name, kind in kinds.items():
        known = {one.name: one for one in declared(kind)}
        yield from ("", f"### numdev {name}", "", *_OF_TABLE)
        yield from (_setting(each, one) for each, one in known.items())
        if name == "report":  # whose defaults are those of the settings
            continue
        own = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
        for key, value in own.items():
            if key in run:
                yield _setting(key, run[key], default=value)
            elif key not in ("defaults", "hydra", *known):
                yield f"| `{key}` | `{_stated(value)}` | | |"


def options() -> Iterator[str]:
    """Every option of every group: its meaning, and the values that it sets."""
    from numdev.cli.compose import composer, meanings
    from numdev.sources import config_folder

    own = composer((config_folder(),))
    for group in GROUPS:
        yield from ("", f"### {group}", "", "| option | meaning | states |", "|---|---|---|")
        for option, meaning in sorted(meanings(group).items()):
            values = {key: value for key, value in own.load(f"{group}/{option}").items() if key != "preset"}
            stated = ", ".join(f"`{key}={_stated(value)}`" for key, value in values.items() if _is_plain(key, value))
            yield f"| `{group}={option}` | {cell(escaped(meaning))} | {cell(stated)} |"


def _is_plain(key: str, value: object) -> bool:
    """Whether a value says something by itself: no node, no reference, nothing that is left open."""
    return key != "_target_" and value is not None and not isinstance(value, dict) and "${" not in str(value)


def columns() -> Iterator[str]:
    """The data dictionary of every kind of measurement, by kind of column."""
    from numdev.attention.operation import ATTENTION, ATTENTION_BACKWARD
    from numdev.measurement.deviation import COMPARISON, DIRECTIONS
    from numdev.measurement.metrics import METRICS
    from numdev.measurement.speed import FOLLOWING, MEASURED
    from numdev.report.reading import columns as known
    from numdev.training import weights as training

    operations = (ATTENTION, ATTENTION_BACKWARD, training.TRAINING)
    settings = {column.name: column for operation in reversed(operations) for column in operation.settings()}
    counters = {f"counter.{column.name}": column for operation in operations for column in operation.counters}
    tables = {
        "Metrics of a deviation": [*METRICS],
        "Metrics of the error of a gradient": [column.name for column in DIRECTIONS],
        "Counters": [*counters],
        "Speed": [*MEASURED, *FOLLOWING],
        "Of a row, a point, a claim or a comparison": [column.name for column in COMPARISON] + [*known.FIXED],
        "Settings: problem": [name for name in settings if name.startswith("problem.")],
        "Settings: what is measured": [name for name in settings if name.startswith("variant.")],
        "Settings: how speed is timed": [*known.TIMING],
    }
    text = known.dictionary(tables, known.SHIPPED | counters | settings)
    first, others = text[text.index("\n## ") :].split("\n## Of a row", 1)
    yield first
    trained = {**training.TABLES, training.WATCH: training.WATCHED}
    text = known.dictionary(
        {f"Training: the table `{name}`": [column.name for column in table] for name, table in trained.items()},
        {column.name: column for table in trained.values() for column in table},
    )
    yield text[text.index("\n## ") :]
    yield f"## Of a row{others}"
    yield from ("## Made from others", "", "| column | meaning |", "|---|---|")
    yield from (f"| `<metric>.{name}` | {text} |" for name, text in known.STATISTICS.items())
    yield f"| `label.<name>` | {known.LABELLED} |"
    yield "| `baseline.<name>` | what `variant.<name>` is, of the baseline |"


def rules() -> Iterator[str]:
    """How an interval becomes a verdict."""
    from numdev.report.claims import verdicts

    yield from ("| question | holds if the interval | fails if the interval |", "|---|---|---|")
    yield from ("| " + " | ".join(map(cell, rule)) + " |" for rule in verdicts.rules())


def launch_table() -> Iterator[str]:
    """The pinned launch settings of the portable kernel, and what tuned them."""
    entries = json.loads((ROOT / "numdev" / "data" / "launch.json").read_text())["entries"]
    runs = [f"by `{each['command']}` on one {each['device']} with {_listed(each['versions'])}" for each in entries]
    yield from (f"Tuned {'; '.join(dict.fromkeys(runs))}.", "")
    names = [name for name in entries[0] if name not in ("command", "device", "versions")]
    yield from ("| " + " | ".join(names) + " |", "|---" * len(names) + "|")
    yield from ("| " + " | ".join(str(each.get(name, "")) for name in names) + " |" for each in entries)


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def notebooks() -> Iterator[str]:
    """Each notebook's title with a link to its page, and what its first cell says, but for how to install it."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        title, *paragraphs = first.split("\n\n")
        told = [text for text in paragraphs if not text.startswith("Install it")]
        yield from ("", f"## [{title.removeprefix('# ')}](notebooks/{path.stem}.md)", "", "\n\n".join(told), "")
        yield from ("```sh", f"jupyter lab notebooks/{path.name}", "```")


def changelog() -> Iterator[str]:
    """The changelog from its first version on."""
    text = (ROOT / "CHANGELOG.md").read_text()
    yield text[text.index("\n## ") + 1 :]


def assumed() -> Iterator[str]:
    """What the first scenario that stands for the paper sets, of each study of Figures 3 to 6."""
    yield from ("| study | settings | axes |", "|---|---|---|")
    for name, study in studies().items():
        if not re.fullmatch(r"fig[3-6][abc]?", name):
            continue
        scenario = next(each for each in study["scenarios"].values() if each["role"] in ("paper", "assumed"))
        own = {key: value for key, value in scenario.items() if key not in ("title", "role", "axes")}
        axes = study["axes"] | scenario.get("axes", {})
        stated = " ".join(f"`{key}={_stated(value)}`" for key, value in (study["base"] | own).items())
        swept = " ".join(f"`{key}={','.join(map(_stated, values))}`" for key, values in axes.items())
        yield f"| `{name}` | {stated} | {swept} |"
