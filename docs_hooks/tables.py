"""Tables that pages take from the code, from `configs/` and from the reference results."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "reports" / "reference"
GROUPS = ("problem", "precision", "tiling", "softmax", "attention", "backward", "baseline", "task")


def escaped(text: str) -> str:
    """Plain text as Markdown."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def cell(text: str) -> str:
    """Markdown as a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\|", text)


@lru_cache(maxsize=1)
def studies() -> dict[str, dict[str, Any]]:
    """Every study's file, by name."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs" / "study").glob("*.yaml"))}


def study_table() -> Iterator[str]:
    """Names and titles."""
    yield from ("| study | title |", "|---|---|")
    yield from (f"| `{name}` | {cell(study['title'])} |" for name, study in studies().items())


def settings() -> Iterator[str]:
    """Every setting of the groups and of the run: its default, unit and sentence, where it is declared."""
    from numdev.attention.settings import BACKWARD_GROUPS
    from numdev.attention.settings import GROUPS as TYPED
    from numdev.cli.schema import RunConfig
    from numdev.settings import declared
    from numdev.training.settings import GROUPS as TRAINING

    yield from ("| setting | default | unit | |", "|---|---|---|---|")
    for group, kind in {**TYPED, "": RunConfig}.items():
        for one in declared(kind):
            name = f"{group}.{one.name}" if group else one.name
            yield f"| `{name}` | `{_stated(one.default)}` | {one.unit} | {cell(escaped(one.text))} |"
    known = {(group, one.name, one.text) for group, kind in TYPED.items() for one in declared(kind)}
    others = [("the backward pass", item) for item in BACKWARD_GROUPS.items()] + [("training", item) for item in TRAINING.items()]
    for operation, (group, kind) in others:
        for one in declared(kind):
            if (group, one.name, one.text) not in known:
                known.add((group, one.name, one.text))
                text = f"of {operation}: {escaped(one.text)}"
                yield f"| `{group}.{one.name}` | `{_stated(one.default)}` | {one.unit} | {cell(text)} |"
    yield from _of_options()


def _of_options() -> Iterator[str]:
    """The settings that an option alone has."""
    from numdev.cli import nodes
    from numdev.settings import declared

    told = set()
    for group in ("problem", "attention", "backward", "baseline", "task"):
        for path in sorted((ROOT / "configs" / group).glob("*.yaml")):
            leaf = yaml.safe_load(path.read_text())
            inner = {f"{group}.{name}": leaf[name] for name in ("source", "data") if name in leaf}
            for name, node in (inner if "source" in leaf else {group: leaf} | inner).items():
                kind = nodes.made_by(node["_target_"])
                for one in declared(kind) if kind else ():
                    if one.name in node and (name, one.name, path.stem) not in told:
                        told.add((name, one.name, path.stem))
                        text = f"of `{group}={path.stem}`: {escaped(one.text)}"
                        yield f"| `{name}.{one.name}` | `{_stated(node[one.name])}` | {one.unit} | {cell(text)} |"


def _stated(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def honoured() -> Iterator[str]:
    """The settings that each variant and each baseline honours, a group's name with a star for all of its settings."""
    from numdev.cli.composed import Composer, composer
    from numdev.cli.honoured import honours_of
    from numdev.cli.library import config_folder

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

    yield from ("| | honours |", "|---|---|")
    for operation, group in (("attention", "attention"), ("attention_backward", "backward"), ("attention", "baseline")):
        known = composer((config_folder(),), operation=operation)
        for option in known.library.options(group):
            honours = honours_of({**known.values(), **known.values(group, option)}, group)
            yield f"| `{group}={option}` | {told(known, honours.settings, honours.family)} |"


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
    for name, kind in kinds.items():
        yield from ("", f"### numdev {name}", "", "| setting | default | unit | |", "|---|---|---|---|")
        yield from (
            f"| `{one.name}` | `{_stated(one.default)}` | {one.unit} | {cell(escaped(one.text))} |" for one in declared(kind)
        )
        if name == "report":
            continue
        own = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
        yield from (f"| `{key}` | `{_stated(value)}` | | |" for key, value in own.items() if key not in ("defaults", "hydra"))


def options() -> Iterator[str]:
    """Every option of every group: its comment, and what its file says."""
    for group in GROUPS:
        yield from ("", f"### {group}", "", "| option | says | |", "|---|---|---|")
        for path in sorted((ROOT / "configs" / group).glob("*.yaml")):
            lines = path.read_text().splitlines()
            comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
            stated = "; ".join(f"`{cell(line.partition('#')[0].strip())}`" for line in lines if line and line[0] != "#")
            note = " ".join(line.partition("#")[2].strip() for line in lines if not line.startswith("#") and "#" in line)
            yield f"| `{group}={path.stem}` | {stated} | {cell(f'{comment} {note}'.strip())} |"


def meanings() -> Iterator[str]:
    """What `numdev measure --help` says of each group."""
    from numdev.cli.schema import explained

    text = yaml.safe_load((ROOT / "configs" / "hydra" / "help" / "measure.yaml").read_text())["template"]
    body = text[text.index("== problem") : text.index("Groups and options")]
    filled = re.sub(r"\$\{numdev\.settings:(\w+)\}", lambda found: explained(found[1]), body)
    yield from ("```text", filled.rstrip(), "```")


def columns() -> Iterator[str]:
    """The data dictionary, by kind of column."""
    from numdev.attention.operation import ATTENTION
    from numdev.measurement.deviation.measurement import COMPARISON
    from numdev.measurement.deviation.metrics import METRICS
    from numdev.measurement.speed.columns import COUNTED, FOLLOWING, MEASURED
    from numdev.report.reading import columns as known
    from numdev.report.reading import configuration

    settings = {column.name: column for column in ATTENTION.settings()}
    tables = {
        "Of a row, a point or a comparison": [column.name for column in COMPARISON] + [*known.FIXED],
        "Metrics": [*METRICS],
        "Counters": [f"counter.{column.name}" for column in ATTENTION.counters],
        "Speed": [*MEASURED, *COUNTED, *FOLLOWING],
        "Problem": [name for name in settings if name.startswith("problem.")],
        "What is measured, and the baseline": [name for name in settings if name.startswith("variant.")],
        "How speed is timed": [*configuration.TIMING],
    }
    counters = {f"counter.{column.name}": column for column in ATTENTION.counters}
    text = known.dictionary(tables, known.SHIPPED | counters | settings)
    yield text[text.index("\n## ") :]
    yield from ("## Made from others", "", "| column | meaning |", "|---|---|")
    yield from (f"| `<metric>.{name}` | {text} |" for name, text in known.STATISTICS.items())
    yield f"| `label.<name>` | {known.LABELLED} |"
    yield "| `baseline.<name>` | of the baseline, what `variant.<name>` is of what is measured |"


def rules() -> Iterator[str]:
    """How an interval becomes a verdict."""
    from numdev.report.claims import finding

    yield from ("| question | holds if the interval | fails if the interval |", "|---|---|---|")
    yield from ("| " + " | ".join(map(cell, rule)) + " |" for rule in finding.rules())


def claims() -> Iterator[str]:
    """Every claim, and what the reference results say of it in the first scenario."""
    from numdev.report.studies.registry import CLAIMS

    folders = [path.parent for path in sorted(REFERENCE.glob("*/claims.csv"))]
    found = {folder.name: _first_findings(folder / "claims.csv") for folder in folders}
    yield "| name | claim | source | " + " | ".join(found) + " |"
    yield "|---|---|---|" + "---|" * len(found)
    for name, claim in CLAIMS.items():
        cells = [escaped(rows.get(name, "not measured")) for rows in found.values()]
        yield f"| `{name}` | {cell(claim.text)} | {cell(claim.source)} | {' | '.join(cells)} |"


def _first_findings(path: Path) -> dict[str, str]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["claim"]: f"{row['verdict']}: {row['figure']}" for row in reversed(rows)}


def launch_table() -> Iterator[str]:
    """The pinned launch settings of the portable kernel, and what tuned them."""
    entries = json.loads((ROOT / "numdev" / "data" / "launch.json").read_text())["entries"]
    runs = [f"by `{each['command']}` on one {each['device']} with {_listed(each['versions'])}" for each in entries]
    yield from (f"Tuned {'; '.join(dict.fromkeys(runs))}.", "")
    names = [name for name in entries[0] if name not in ("command", "device", "versions")]
    yield from ("| " + " | ".join(names) + " |", "|---" * len(names) + "|")
    yield from ("| " + " | ".join(str(each.get(name, "")) for name in names) + " |" for each in entries)


def kernel_speed() -> Iterator[str]:
    """What `benchmarks/kernels.py` printed on one H200: TFLOP/s of each kernel, and ours over cuDNN's."""
    command, device, *lines = (REFERENCE / "h200" / "benchmarks" / "kernels.txt").read_text().splitlines()
    rows = [line for line in lines if line.startswith("d ")]
    yield from (f"`{command.removeprefix('# ')}`, {device.removesuffix(' TFLOP/s')}:", "")
    kernels = ("sdpa cudnn", "sdpa flash", "numdev portable", "numdev hopper")
    yield f"| d | mask | N | {' | '.join(kernels)} | hopper / cudnn |"
    yield "|---" * (len(kernels) + 4) + "|"
    for line in rows:
        d, mask, n = re.findall(r"d +(\d+) (\w+) +N +(\d+)", line)[0]
        rates = dict(re.findall(r"((?:sdpa|numdev) \w+) +(\d+)", line))
        yield f"| {d} | {mask} | {n} | {' | '.join(rates[name] for name in kernels)} | {line.split()[-1]} |"
    yield from ("", f"{'; '.join(lines[len(rows) :])}.")


def backward_speed() -> Iterator[str]:
    """What `benchmarks/backward.py` printed on one H200: TFLOP/s of each backward pass, in brackets over cuDNN's."""
    command, device, *lines = (REFERENCE / "h200" / "benchmarks" / "backward.txt").read_text().splitlines()
    rows = [line for line in lines if line.startswith("d ")]
    yield from (f"`{command.removeprefix('# ')}`, {device.removesuffix(' TFLOP/s')}:", "")
    kernels = ("cudnn", "flash", "portable", "split", "fused")
    yield f"| d | mask | N | {' | '.join(kernels)} |"
    yield "|---" * (len(kernels) + 3) + "|"
    for line in rows:
        d, mask, n = re.findall(r"d +(\d+) (\w+) +N +(\d+)", line)[0]
        rates = {name: f"{rate} ({share})" for name, rate, share in re.findall(r"(\w+) +(\d+) \(([\d.]+)\)", line)}
        yield f"| {d} | {mask} | {n} | {' | '.join(rates[name] for name in kernels)} |"
    yield from ("", f"{'; '.join(line for line in lines[len(rows) :] if 'cudnn' in line)}.")


def decode_speed() -> Iterator[str]:
    """What `benchmarks/decode.py` printed on one H200: GB/s of each kernel, and ours over cuDNN's."""
    command, device, *lines = (REFERENCE / "h200" / "benchmarks" / "decode.txt").read_text().splitlines()
    yield from (f"`{command.removeprefix('# ')}`, {device.removesuffix(' GB/s')}:", "")
    kernels = ("sdpa cudnn", "sdpa flash", "numdev auto", "unsplit hopper", "unsplit portable")
    yield f"| sequences | keys | {' | '.join(kernels)} | auto / cudnn | what auto ran |"
    yield "|---" * (len(kernels) + 4) + "|"
    for line in lines[:-1]:
        batch, keys = re.findall(r"batch +(\d+) keys +(\d+)", line)[0]
        rates = dict(re.findall(r"((?:sdpa|numdev|unsplit) \w+) +(\d+)", line))
        ratio, kernel = re.findall(r"auto/cudnn ([\d.]+)  (.*)", line)[0]
        yield f"| {batch} | {keys} | {' | '.join(rates[name] for name in kernels)} | {ratio} | {kernel} |"


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def notebooks() -> Iterator[str]:
    """Each notebook's title and what it says of itself: its first cell, but for how to install it."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        title, *paragraphs = first.split("\n\n")
        told = [text for text in paragraphs if not text.startswith("Install it")]
        yield from ("", f"## {title.removeprefix('# ')}", "", "\n\n".join(told), "")
        yield from ("```sh", f"jupyter lab notebooks/{path.name}", "```")


def changelog() -> Iterator[str]:
    """The changelog from its first version on."""
    text = (ROOT / "CHANGELOG.md").read_text()
    yield text[text.index("\n## ") + 1 :]
