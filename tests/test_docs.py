"""Documentation and README: what they say to type works, their numbers are those of the reference results, and the site is whole.

The wording of reference results is that of the numdev that made them, and binds nobody.
"""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import numdev as nd
from docs_hooks import tables
from docs_hooks.quoted import figure
from numdev.cli import certify as certification
from numdev.cli import compare as comparison
from numdev.cli import launch
from numdev.cli.main import COMMANDS
from numdev.measurement.studies import Batch, Plan
from numdev.report.comparison import Criterion

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Packages that numdev does not depend on, a GPU, and the figure that a sweeper would minimise, which a dry run does not have.
_OMITTED = (
    *("hydra/launcher=", "hydra.launcher.", "hydra/sweeper=", "hydra.sweeper.", "hydra/callbacks=", "hydra.callbacks."),
    *("device=", "objective="),
)
DOCS = ROOT / "docs"
README = ROOT / "README.md"
TEXT = README.read_text()
FINDINGS = " ".join(TEXT.partition("## Four findings")[2].partition("\n## ")[0].split())
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file that it is to be written to, and its text."""

    language: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*result) for result in _FENCE.findall(page.read_text())]


def check(text: str, folder: Path) -> None:
    """Every line of a shell block can be understood where `folder` is the current one."""
    for line in text.splitlines():
        words = shlex.split(line.removesuffix("&"), comments=True)
        while words and re.match(r"[A-Z_0-9]+=", words[0]):  # settings of the environment
            words = words[1:]
        if words:
            check_line(words[0], words[1:], folder)


def check_line(program: str, words: list[str], folder: Path) -> None:
    if program == "numdev":
        check_numdev(words, folder)
    elif program == "make":
        assert set(words) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    elif program == "python":
        assert (ROOT / (f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0])).is_file()
    elif program == "pytest":
        assert all(word.startswith(("--numdev-depth=", "--junitxml=")) for word in words)
    elif program == "jupyter":
        assert words[0] == "lab"
        assert (ROOT / words[1]).is_file()
    else:
        assert (program, words[0]) == ("pip", "install"), f"{program}: this test does not know what that is"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", " ".join(words))) <= set(extras)


def check_numdev(words: list[str], folder: Path) -> None:
    """Runs a command as a dry run, or shows its settings where it has none; a study must hold no point that is refused."""
    command, rest = words[0], words[1:]
    if command.startswith("-"):
        assert command in ("--help", "--version")
        return
    assert command in COMMANDS
    if "--help" in rest:
        return
    if command == "compare":
        settings = comparison.parsed("numdev compare", ("", ""), dict.fromkeys("ab", ""), comparison.SETTINGS, rest)
        Criterion(settings.metric, settings.reference, settings.tolerance)
    elif command == "doctor":
        comparison.parsed("numdev doctor", ("", ""), {"what": ""}, {}, rest)
    elif command == "certify":
        certification.read(rest)
    elif command != "studies":
        kept = [text for text in rest if not text.startswith(_OMITTED)]
        kept = [re.sub(r"=choice\((.*)\)$", r"=\1", text) for text in kept]  # values that a sweeper would draw from
        if "--config-dir" in kept:
            at = kept.index("--config-dir") + 1
            kept[at] = next(str(path / kept[at]) for path in (folder, ROOT) if (path / kept[at]).is_dir())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Batch, "plans", planned)
            more = {"map": [], "report": ["--cfg", "job"]}.get(command, ["dry_run=true"])
            assert launch.launch(command, list(dict.fromkeys(kept + more))) == 0


def planned(batch: Batch) -> dict[str, Plan]:
    refused = [point.refused for study, _ in batch.work for point in study.points if point.refused]
    assert not refused, refused
    return {study.name: Plan() for study, _ in batch.work}


def test_bash_can_read_what_there_is_to_type() -> None:
    """A parenthesis outside quotes, as in shard=range(0,8), is an error there but not to `shlex`."""
    for page in (README, *(DOCS / page for page in PAGES)):
        text = "".join(block.text for block in blocks(page) if block.language in ("sh", "bash"))
        ran = subprocess.run(["bash", "-n"], check=False, input=text, capture_output=True, text=True)
        assert ran.returncode == 0, f"{page}: {ran.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(DOCS / page)])
def test_what_a_page_says_to_type_works(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, Python is run and commands are composed in the order of the page, in one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where dataclasses look for the names of their annotations
    for block in blocks(DOCS / page):
        if block.file:
            file = tmp_path / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, page, "exec", dont_inherit=True), vars(module))
        elif block.language == "sh":
            check(block.text, tmp_path)
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_every_public_name_is_in_the_reference() -> None:
    listed = [
        name
        for path in (DOCS / "reference" / "api").glob("*.md")
        for name in re.findall(r"^::: numdev\.(\w+)$", path.read_text(), re.MULTILINE)
    ]
    assert sorted(listed) == sorted(nd.__all__)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning, such as a link to nowhere, ends the build."""
    out = tmp_path_factory.mktemp("docs") / "site"
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        check=False,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "NUMDEV_NOTEBOOK_SMALL": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return out


@pytest.mark.slow
@pytest.mark.xdist_group("docs")
class TestSite:
    def test_has_every_page(self, site: Path) -> None:
        assert [page for page in PAGES if not (site / page).with_suffix(".html").is_file()] == []

    def test_asks_no_other_host(self, site: Path) -> None:
        """Links may lead elsewhere; scripts, styles, fonts and images are all its own."""
        foreign = re.compile(
            r'<(?:script|img|iframe|source)[^>]*\ssrc="?(?:https?:)?//[^>]*>|<link(?![^>]*rel="?canonical)[^>]*href="?(?:https?:)?//[^>]*>'
        )
        result = {path.name: foreign.findall(path.read_text()) for path in site.rglob("*.html")}
        assert {name: tags for name, tags in result.items() if tags} == {}

    def test_no_formula_or_block_is_left(self, site: Path) -> None:
        for path in site.rglob("*.html"):
            text = path.read_text()
            assert 'class="arithmatex"' not in text, path
            assert "{{ " not in text, path

    def test_every_notebook_ran_and_drew_and_is_kept_without_outputs(self, site: Path) -> None:
        notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
        assert len(notebooks) > 3
        for path in notebooks:
            assert '<img class="notebook"' in (site / "notebooks" / f"{path.stem}.html").read_text(), path
            cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
            assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), path

    @pytest.mark.parametrize("page", ["gallery", "notebooks"])
    def test_commands_of_generated_blocks_work(
        self, site: Path, tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = re.findall(r'<div class="language-sh highlight">(.*?)</div>', (site / f"{page}.html").read_text(), re.DOTALL)
        assert len(result) > 3
        for text in dict.fromkeys(result):
            check(html.unescape(re.sub(r"<[^>]+>", "", text)), tmp_path)


@pytest.mark.parametrize("row", [{"claim": "fig4"}, {"claim": "fig4", "scenario": "uniform_each", "pick": "a penny (x)"}])
def test_what_names_nothing_or_more_than_one_number_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(LookupError, match="rows have|finds nothing"):
        figure("cpu/claims.csv", **row)


def test_every_setting_and_every_metric_is_in_the_reference() -> None:
    from numdev.cli.schema import settings
    from numdev.measurement.metrics import DIRECTED, METRICS
    from numdev.measurement.speed import MEASURED
    from numdev.training.weights import METRICS as OF_WEIGHTS

    messages = "\n".join(tables.settings())
    assert [name for name in settings() if f"| `{name}` |" not in messages] == []
    messages = "\n".join(tables.columns())
    names = [*METRICS, *DIRECTED, *MEASURED, *OF_WEIGHTS]
    assert [name for name in names if f"| `{name}` |" not in messages] == []


def test_the_numbers_of_the_findings_are_those_of_the_reference_results() -> None:
    """In their order, beside the paper's own 10 times, lengths N and the names of formats."""
    number = r"\d[\d.]*(?:e-?\d+)?(?<!\.)"

    def fig4(scenario: str) -> str:
        return figure("cpu/claims.csv", rf"^({number} \[{number}, {number}\])", claim="fig4", scenario=scenario)

    def on_gpu(claim: str, scenario: str, pick: str) -> str:
        where: dict[str, Any] = {"column": "sentence"} if claim == "long" else {}
        return figure("h200/claims.csv", pick, claim=claim, scenario=scenario, **where)

    def fp8(step: str) -> str:
        where: dict[str, Any] = {"scenario": "uniform", "label.problem.n": "131072", "subject": "variant", "label.step": step}
        return figure("cpu/fp8/summary.csv", form=".3g", column="rmse.mean", reference="golden", **where)

    lengths = {"kernel_uniform": (1024, 131072), "uniform": (1024, 65536)}
    measured = [
        *map(fig4, ("uniform_each", "normal_each", "captured_each", "kernel_uniform", "kernel_normal", "kernel_captured")),
        *(on_gpu("long", name, rf"({number}) at {n}\b") for name, pair in lengths.items() for n in pair),
        on_gpu("kernels", "normal", f"({number} to {number}) times"),
        *(on_gpu("kernels", name, rf"uniform.F. ({number}) times") for name in ("normal", "uniform")),
        *(fp8(step) for step in ("never promoted", "promoted after a tile")),
    ]
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\b[A-Z]+\d+\b|N = \d+", "", FINDINGS)
    assert [each for each in re.findall(number, text) if each != "10"] == re.findall(number, " ".join(measured))


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("https://")]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link.partition("#")[0]).is_file()] == []


@pytest.mark.slow
def test_what_the_readme_says_to_type_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
