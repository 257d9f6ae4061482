"""The README: its links lead somewhere, its commands work, and its numbers are those of the reference results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import numdev as nd
from docs_hooks.quoted import figure
from tests.docs_commands import ROOT, blocks, check

README = ROOT / "README.md"
TEXT = README.read_text()
FINDINGS = " ".join(TEXT.partition("## Three findings")[2].partition("\n## ")[0].split())


def test_the_numbers_of_the_findings_are_those_of_the_reference_results() -> None:
    """In their order, beside the paper's own 10 times, lengths N and the names of formats."""
    number = r"\d[\d.]*(?:e-?\d+)?(?<!\.)"

    def fig4(scenario: str) -> str:
        return figure("cpu/claims.csv", rf"^({number} \[{number}, {number}\])", claim="fig4", scenario=scenario)

    def on_gpu(claim: str, scenario: str, pick: str) -> str:
        where = {"column": "sentence"} if claim == "long" else {}
        return figure("h200/claims.csv", pick, claim=claim, scenario=scenario, **where)

    lengths = {"kernel_uniform": (1024, 131072), "uniform": (1024, 65536)}
    measured = [
        *map(fig4, ("uniform_each", "normal_each", "captured_each", "kernel_uniform", "kernel_normal", "kernel_captured")),
        *(on_gpu("long", name, rf"({number}) at {n}\b") for name, pair in lengths.items() for n in pair),
        on_gpu("kernels", "normal", f"({number} to {number}) times"),
        *(on_gpu("kernels", name, rf"uniform.F. ({number}) times") for name in ("normal", "uniform")),
    ]
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\b[A-Z]+\d+\b|N = \d+", "", FINDINGS)
    assert [each for each in re.findall(number, text) if each != "10"] == re.findall(number, " ".join(measured))


def test_every_link_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("https://")]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link.partition("#")[0]).is_file()] == []


@pytest.mark.slow
def test_what_it_says_to_type_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    measured = []
    for block in blocks(README):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "python":
            names: dict[str, object] = {}
            exec(compile(block.text.replace("1024", "64"), "README", "exec", dont_inherit=True), names)
            measured.append(names["record"])
        elif block.language == "sh":
            check(block.text, tmp_path)
    for command in re.findall(r"`((?:numdev|make) [^`]+)`", TEXT):
        check(command, tmp_path)
    (record,) = measured
    assert isinstance(record, nd.Record)
    assert record.status is nd.Status.OK
    sys.modules.pop("mykernel", None)
