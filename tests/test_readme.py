"""The README: short, its links lead somewhere, its commands work, and its numbers are those of the reference results."""

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
LONGEST = 115  # lines, about two screens

NUMBER = r"[\d.]+(?:e-?\d+)?"
MEASURED_ON_GPU = "h200/claims.csv"


def at(scenario: str, n: int) -> str:
    """The largest deviation at one length of the study `long`."""
    return figure(MEASURED_ON_GPU, rf"({NUMBER}) at {n}\b", column="sentence", claim="long", scenario=scenario)


def fig4(scenario: str) -> str:
    return figure("cpu/claims.csv", rf"^({NUMBER} \[{NUMBER}, {NUMBER}\])", claim="fig4", scenario=scenario)


def rmse(scenario: str, pick: str) -> str:
    return figure(MEASURED_ON_GPU, pick, claim="kernels", scenario=scenario)


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    """What the findings say in numbers, made from the reference results."""
    kernels = f"({NUMBER} to {NUMBER}) times"
    return [
        f"{fig4('uniform_each')} times as much as the baseline on uniform inputs, {fig4('normal_each')} times on normal inputs "
        f"and {fig4('captured_each')} times on tensors captured",
        f"{fig4('kernel_uniform')}, {fig4('kernel_normal')} and {fig4('kernel_captured')} times.",
        f"{at('kernel_uniform', 1024)} at N = 1024 and {at('kernel_uniform', 131072)} at N = 131072",
        f"{at('uniform', 1024)} at N = 1024 and {at('uniform', 65536)} at N = 65536",
        f"{rmse('normal', kernels)} times that of the emulation with FP32 inside",
        f"{rmse('normal', rf'uniform.F. ({NUMBER}) times')} times (normal inputs) "
        f"to {rmse('uniform', rf'uniform.F. ({NUMBER}) times')} times (uniform inputs)",
    ]


def test_the_findings_say_what_was_measured(sentences: list[str]) -> None:
    for sentence in sentences:
        assert sentence in FINDINGS


def test_every_number_of_the_findings_is_among_these(sentences: list[str]) -> None:
    rest = FINDINGS
    for sentence in sentences:
        rest = rest.replace(sentence, "")
    rest = re.sub(
        r"`[^`]*`|\]\([^)]*\)|FP32|FP64|BF16|N = 2048", "", rest
    )  # commands, addresses, names, and the size of the study
    assert re.findall(r"\d+", rest) == ["10"], "the paper's own figure, and no other"


def test_it_takes_two_screens_and_shows_one_figure() -> None:
    assert len(TEXT.splitlines()) <= LONGEST
    assert re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT) == ["reports/reference/cpu/figures/fig4.svg"]


def test_every_link_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("https://")]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link.partition("#")[0]).is_file()] == []


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
