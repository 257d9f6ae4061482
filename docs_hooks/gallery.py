"""The gallery: every figure of the reference results with its title, caption, verdict and the commands that make it."""

from __future__ import annotations

import csv
import html
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from docs_hooks.tables import REFERENCE, cell, escaped, studies

Rows = list[dict[str, str]]

TITLES = {
    "cpu": "Figures 3 to 6 of the paper, on a CPU",
    "cpu/elements": "Errors of single elements, on a CPU",
    "cpu/speed": "Speed, on a CPU",
    "cpu/restart": "Restarts of training, on a CPU",
    "cpu/spikes": "Loss spikes, on a CPU",
    "cpu/training": "Training, on a CPU",
    "cpu/fp8": "FP8 attention, predicted on a CPU",
    "cpu/kv_cache": "Formats of a KV cache, on a CPU",
    "cpu/mismatch": "A trainer and a sampler, on a CPU",
    "cpu/operations": "Operations beside attention, on a CPU",
    "h200": "Real kernels and long sequences, on a GPU",
    "h200/backward": "Gradients, on GPUs",
    "h200/fp8": "An FP8 kernel with scales beside its prediction, on a GPU",
    "h200/fp8_kernel": "An FP8 kernel beside its prediction, on a GPU",
    "h200/mismatch": "A trainer and a sampler, on a GPU",
    "h200/operations": "Operations beside attention, on a GPU",
    "h200/speed": "Speed, on a GPU",
    "h200/training": "Training, on GPUs",
    "h200/training_language": "Training of a language model, on a GPU",
    "h200/validate": "Real kernels beside their emulation, on a GPU",
}
"""What readers see of the folders that have figures."""


def figures() -> list[Path]:
    """Every figure of the reference results."""
    return sorted(REFERENCE.glob("**/*.svg"))


def place(path: Path) -> str:
    """The folder of the results that a figure belongs to, as the README of the reference results names it."""
    folder = path.parent.parent if path.parent.name == "figures" else path.parent
    return folder.relative_to(REFERENCE).as_posix()


def address(path: Path) -> str:
    """Where a figure stands in the site."""
    return f"figures/{place(path)}/{path.name}"


def gallery() -> Iterator[str]:
    """One part for each folder, in the order of the report's sections."""
    for name in sorted(set(map(place, figures()))):
        yield from ("", f"## {TITLES[name]} {{ #{name.replace('/', '-')} }}", "")
        yield f"Measured by {_made_by(name)}{_on(REFERENCE / name)}."
        yield f"Its files are in `reports/reference/{name}`."
        for path in sorted((path for path in figures() if place(path) == name), key=lambda path: _order(path.stem)):
            yield from _figure(path)


def _figure(path: Path) -> Iterator[str]:
    name, study = place(path), study_of(path.stem)
    shown = _tag(path.read_text(), "desc")
    found = [row for row in _claims(REFERENCE / name) if row["study"] == path.stem]
    said = shown
    for row in found:  # they stand in the table
        said = said.replace(f" {row['scenario.title']}: {row['figure']}.", "")
    yield from ("", f"### {escaped(title(path))} {{ #{name.replace('/', '-')}-{path.stem} }}", "")
    alt = shown.replace("[", "(").replace("]", ")").replace('"', "'")
    yield f"[![{alt}]({address(path)})]({address(path)})"
    yield from ("", escaped(said), "")
    if found:
        yield from _verdicts(found)
    if study is not None:
        device = "cpu" if name.startswith("cpu") else "cuda"
        yield from ("```sh", *_commands(study, device), "```")


def title(path: Path) -> str:
    """What a figure is called: its own title; where others have the same, its study's, and which of the study's figures it is."""
    own, study = _tag(path.read_text(), "title"), study_of(path.stem)
    which = path.stem.removeprefix(study or path.stem).strip("_").replace("_", " ")
    if study and which and _titles().count(own) > 1:
        own = f"{studies()[study]['title']}: {which}"
    number = re.match(r"fig(\d[abc]?)", path.stem)
    return f"Figure {number[1]}: {own}" if number and not own.startswith("Figure") else own


@lru_cache(maxsize=1)
def _titles() -> list[str]:
    return [_tag(path.read_text(), "title") for path in figures()]


def _commands(study: str, device: str) -> Iterator[str]:
    from numdev.cli.compose import composer
    from numdev.sources import config_folder

    trains, times = composer((config_folder(),)).operation_of(study) == "training", study.startswith("speed_")
    yield f"numdev {'train' if trains else 'speed' if times else 'measure'} study={study} device={device}"
    if not trains and not times:  # which report by themselves
        yield f"numdev report study={study} out=reports/mine"


def _verdicts(rows: Rows) -> Iterator[str]:
    """The verdict in a sentence, and what every scenario says, folded."""
    by_claim = {row["claim"]: [each for each in rows if each["claim"] == row["claim"]] for row in rows}
    for claim in by_claim.values():
        brief = re.sub(r" \([^()]*\)", "", claim[0]["overall"])
        yield from (f"**Claim:** {escaped(claim[0]['text'])} ({escaped(claim[0]['source'])}).", "")
        yield from (f"**Verdict:** {escaped(brief)}.", "")
        yield from ('??? note "Every scenario"', "", "    | scenario | verdict | measured |", "    |---|---|---|")
        for row in claim:
            yield f"    | {cell(escaped(row['scenario.title']))} | {row['verdict']} | {cell(escaped(row['figure']))} |"
        yield ""


@lru_cache(maxsize=8)
def _claims(folder: Path) -> Rows:
    path = folder / "claims.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _made_by(name: str) -> str:
    """The command that the README of the reference results names."""
    found = re.search(rf"^\| `{name}` \| (`[^`]+`)", (REFERENCE / "README.md").read_text(), re.MULTILINE)
    assert found, f"{REFERENCE / 'README.md'} has no line for {name}"
    return found[1]


def study_of(stem: str) -> str | None:
    """The study that a figure is of: `<study>.svg`, or `<study>_<figure>.svg` for its further ones."""
    names = [name for name in studies() if stem == name or stem.startswith(f"{name}_")]
    return max(names, key=len, default=None)


def _order(stem: str) -> tuple[int, str]:
    """The order of the report's chapters; what has none comes last."""
    from numdev.report.studies.registry import CHAPTERS

    numbers = {chapter.study: chapter.place for chapter in CHAPTERS}
    return numbers.get(study_of(stem) or "", 1000), stem


def _on(folder: Path) -> str:
    """The device, where the folder says it."""
    path = folder / "environment.json"
    if not path.is_file():
        return ""
    facts = json.loads(path.read_text())[0]["facts"]
    name = facts["processor"] if facts["device"] == "cpu" else facts["device"]
    return f" on one {name} with {facts['threads']} threads, torch {facts['torch']}"


def _tag(svg: str, name: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>", svg, re.DOTALL)
    return html.unescape(found[1]).strip() if found else ""
