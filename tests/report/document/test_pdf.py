"""The PDF: what it says of every study, what it leaves out, and that it is the same for the same results."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typst
from rich.console import Console

from numdev.api import Bench, speed_bench
from numdev.arithmetic.formats import FP32
from numdev.attention.distributions import Distribution
from numdev.attention.exact import Exact
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.cli.compose import Library, config_folder
from numdev.measurement.speed.timing import Budget
from numdev.report.claims.verdicts import ClaimResult, judge
from numdev.report.document.context import WIDEST, Part, command, context
from numdev.report.document.pdf import TYPST, escaped, typeset, write_pdf, write_root
from numdev.report.document.report import make_report
from numdev.report.reading.frames import Results, load
from numdev.report.studies.registry import CHAPTERS, CLAIMS, Chapter
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint, run
from tests.toy_studies import title_of

LIBRARY = Library((config_folder(),))


@pytest.fixture(scope="module")
def results(toy_results: Store) -> Results:
    return load(toy_results)


@pytest.fixture(scope="module")
def out(toy_results: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document")
    make_report(toy_results.path, path, console=Console(quiet=True), formats=("pdf",))
    return path


@pytest.fixture(scope="module")
def shown(results: Results, out: Path) -> dict[str, Any]:
    return context([Part(results, judge(CLAIMS, results), out / "figures")], TYPST)


def test_there_is_a_pdf_of_several_pages(out: Path) -> None:
    data = (out / "report.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    pages = re.search(rb"/Type /Pages\s*/Count (\d+)|/Count (\d+)\s*/Kids", data)
    assert len(re.findall(rb"/Type /Page\b", data)) >= 8 or (pages and int(pages[1] or pages[2]) >= 8)


def test_the_same_results_give_the_same_bytes(results: Results, out: Path) -> None:
    assert write_pdf([Part(results, judge(CLAIMS, results), out / "figures")]) == (out / "report.pdf").read_bytes()


def claims_in(fields: dict[str, Any]) -> set[str]:
    """The names of the claims that a study's file lists or states."""
    return {claim if isinstance(claim, str) else claim["name"] for claim in fields["claims"]}


@pytest.mark.parametrize("section", CHAPTERS, ids=lambda section: section.study)
def test_a_section_is_of_a_study_that_there_is(section: Chapter) -> None:
    fields = LIBRARY.study(section.study)
    assert fields["claims"] or section.study.startswith("speed_"), "a section has a verdict, or a table of speed"
    assert claims_in(fields) <= set(CLAIMS)
    assert section.question.rstrip(")").rpartition("(")[0].strip().endswith("?") or section.question.endswith("?")


def test_every_claim_has_a_section() -> None:
    judged = {claim for section in CHAPTERS for claim in claims_in(LIBRARY.study(section.study))}
    assert judged == set(CLAIMS)


def test_every_section_has_its_figure_findings_and_command(shown: dict[str, Any], results: Results) -> None:
    named = [section.study for section in CHAPTERS if section.study in results.manifests]
    present = [*named, *(name for name in results.manifests if name not in named)]
    titles = {section.study: section.title for section in CHAPTERS}
    expected = [titles.get(name, results.manifests[name]["title"]) for name in present]
    assert sorted(section["title"] for section in shown["sections"]) == sorted(expected)
    again = [bool(section["source"]) for section in shown["sections"]]
    assert again == sorted(again, reverse=True), "the source's figures come first"
    study_of = dict(zip(expected, present, strict=True))
    for section in shown["sections"]:
        study = study_of[section["title"]]
        assert section["figures"], study
        assert section["figures"][0]["alt"]
        assert section["findings"]
        assert f"study={study} device=cpu" in section["command"]
        assert section["figures"][0]["width"] <= WIDEST


def test_the_first_page_has_a_figure_that_its_section_names(shown: dict[str, Any]) -> None:
    headline = shown["headline"]
    assert headline["file"] in {figure["file"] for section in shown["sections"] for figure in section["figures"]}


def test_sections_without_results_are_left_out_and_listed(shown: dict[str, Any], results: Results) -> None:
    own = [section for section in CHAPTERS if section.operation == "attention"]  # no other is measured
    absent = [section.title for section in own if section.study not in results.manifests]
    assert absent, "the toy results have Figures 5a and 5b in one study"
    assert shown["absent"] == absent


def test_a_study_without_a_file_has_a_section_all_the_same(shown: dict[str, Any]) -> None:
    own = next(section for section in shown["sections"] if section["command"].startswith("numdev measure study=fig5"))
    assert own["figures"]
    assert {found["title"] for found in own["findings"]} >= {title_of("uniform_end")}


def test_the_methods_count_what_ran_by_compiled_code(results: Results, tmp_path: Path) -> None:
    points = results.points.copy()
    points["kernel"] = ["numdev compiled", "numdev instrumented br=64 bc=16", *[""] * (len(points) - 2)]
    told = context([Part(replace(results, points=points), (), tmp_path)], TYPST)["compiled"]
    ran = "1 ran by numdev compiled and 1 ran by numdev instrumented"
    assert told == f"Of {points['key'].nunique()} points {ran}, as the column kernel of the tables says."
    plain = replace(results, points=points.assign(kernel=""))
    assert context([Part(plain, (), tmp_path)], TYPST)["compiled"] == ""


def test_a_study_without_a_claim_shows_every_point(tmp_path: Path) -> None:
    problem = Problem(Distribution(), Shape(queries=32, keys=32, head_dim=16))
    precisions = ("fp32", "bf16")
    points = [StudyPoint(problem, Tiled(Precision.parse(p)), None, 2, "normal", {"precision": p}) for p in precisions]
    run(Study("mine", "A study_of #mine", None, (), tuple(points)), Bench(Exact(), "cpu"), Store(tmp_path / "results"))
    make_report(tmp_path / "results", tmp_path / "out", console=Console(quiet=True), formats=("pdf",))
    assert (tmp_path / "out" / "report.pdf").read_bytes().startswith(b"%PDF-")
    loaded = load(Store(tmp_path / "results"))
    whole = context([Part(loaded, [], tmp_path)], TYPST)
    assert whole["compiled"] == ""
    (section,) = whole["sections"]
    (table,) = section["tables"]
    assert [row[0] for row in table["rows"]] == [f"normal precision={p}" for p in precisions]
    assert [row[3] for row in table["rows"]] == ["", ""]  # it has no baseline
    means = loaded.rows[loaded.rows["output"] == "out"].groupby("label.precision")["max_difference"]
    for row, name in zip(table["rows"], precisions, strict=True):
        low, high = means.min()[name], means.max()[name]
        assert low <= float(row[1].split()[0]) * 1.1
        assert float(row[1].split()[0]) <= high * 1.1


def test_a_scenario_says_what_it_is(shown: dict[str, Any], results: Results) -> None:
    """Its shape, tile and seeds come from the points, not from a text."""
    own = next(section for section in shown["sections"] if section["command"].startswith("numdev measure study=fig3"))
    rows = results.study("fig3")
    for found in own["findings"]:
        part = rows[rows["scenario.title"] == found["title"]]
        assert typeset(f"N = {part['problem.shape.keys'].iloc[0]}") in found["about"]
        assert f"({part['seed'].nunique()} here)" in found["about"]


def test_every_claim_is_in_the_summary(shown: dict[str, Any], results: Results) -> None:
    judged = judge(CLAIMS, results)
    assert [claim["text"] for claim in shown["claims"]] == [typeset(result.claim.text) for result in judged]
    for claim, result in zip(shown["claims"], judged, strict=True):
        assert [own["title"] for own in claim["chief"]] == [scenario.title for scenario in result.chief]
    assert f"Of {len(judged)} claims" in shown["summary"]
    counted = re.findall(r"(\d+) (?:is|are) (?:undecided|(?:partly |not )?(?:reproduced|borne out))", shown["summary"])
    assert sum(map(int, counted)) == len(judged)


def test_failures_are_listed_with_their_reasons(shown: dict[str, Any]) -> None:
    assert len(shown["failures"]) == 4  # FlexAttention in two studies and two scenarios
    assert all("CUDA" in row[3] for row in shown["failures"])


def test_the_command_is_the_one_that_was_given(results: Results) -> None:
    given = "numdev measure study=fig3 seeds=2 'problem.key_lengths=[3,4]'"
    manifest = results.manifests["fig3"] | {"command": given}
    changed = replace(results, manifests=results.manifests | {"fig3": manifest})
    assert command(changed, "fig3") == f"{given} device=cpu"


def test_the_first_page_quotes_the_results(shown: dict[str, Any], results: Results) -> None:
    """What is said of Figure 4 is the claim's own figure; the toy results lack Figure 5a and the study of lengths."""
    first = shown["highlights"][0]["sentence"]
    rows = results.study("fig4").query("scenario == 'uniform_end'")
    assert typeset(CLAIMS["fig4"].find(rows).figure) in first
    assert 1 <= len(shown["highlights"]) <= 3


def test_a_reader_meets_no_internal_name(shown: dict[str, Any], results: Results) -> None:
    """Commands, the environment and the names of metrics are to be typed; nothing else is a name of the code."""
    told = {key: value for key, value in shown.items() if key not in ("environments", "metrics", "headline", "methods")}
    scenarios = {name for name in results.points["scenario"] if "_" in name}
    for text in _texts(told):
        if re.match(r"\d+ points: ", text):  # the entries of the axes of a user's own study, as they are to be typed
            continue
        assert not scenarios & set(re.findall(r"\w+", text)), text
        # Formulae, and the labels of points without a result, such as `precision=kernel_bf16`, are left out.
        assert not re.findall(r"\b[a-z]+\d*\\?_[a-z]\w*", re.sub(r"\$.*?\$|[\w.]+=\S+", "", text)), text


def _texts(value: Any, name: str = "") -> list[str]:
    if isinstance(value, dict):
        return [text for key, own in value.items() if key not in ("file", "command", "alt", "study") for text in _texts(own, key)]
    if isinstance(value, list):
        return [text for own in value for text in _texts(own, name)]
    return [value] if isinstance(value, str) else []


def test_every_figure_stands_once_and_numbers_are_one_sequence(results: Results, out: Path, tmp_path: Path) -> None:
    part = Part(results, judge(CLAIMS, results), out / "figures")
    drawn = part.drawn()
    write_root([part], tmp_path)
    pictures = queried(tmp_path, "figure.where(kind: image)")
    assert sorted(figure["body"]["source"] for figure in pictures) == sorted(drawn)
    assert [figure["numbering"] for figure in pictures] == ["1"] * len(drawn)


def test_every_table_has_a_number_and_a_caption_and_the_contents_are_listed(results: Results, out: Path, tmp_path: Path) -> None:
    write_root([Part(results, judge(CLAIMS, results), out / "figures")], tmp_path)
    tables = queried(tmp_path, "figure.where(kind: table)")
    assert len(tables) == len(queried(tmp_path, "table")) > 5
    assert all(table["caption"] and table["numbering"] == "1" for table in tables)
    assert len(queried(tmp_path, "outline")) == 1


def queried(root: Path, selector: str) -> list[dict[str, Any]]:
    """The elements of a report that Typst finds."""
    return json.loads(typst.query(str(root / "report.typ"), selector, root=str(root), ignore_system_fonts=True))


def test_a_claim_that_two_studies_judge_stands_once(results: Results, tmp_path: Path) -> None:
    def rows(*claims: ClaimResult) -> list[dict[str, Any]]:
        return list(context([Part(results, claims, tmp_path)], TYPST)["claims"])

    first = judge(CLAIMS, results)[0]
    assert rows(first, replace(first, study="fig4")) == rows(first)
    failed = {scenario: replace(finding, figure="another") for scenario, finding in first.findings.items()}
    (row,) = rows(first, replace(first, study="fig4", findings=failed))
    assert [chief["figure"] for chief in row["chief"]][len(first.chief) :] == ["another"] * len(first.chief)


def test_environments_stand_beside_one_another(results: Results, tmp_path: Path) -> None:
    (facts,) = results.environments
    other = replace(results, environments=[facts | {"device": "another"}])
    (group,) = context([Part(each, (), tmp_path) for each in (results, other)], TYPST)["environments"]
    assert len(group["titles"]) == 2
    assert ["device", facts["device"], "another"] in group["facts"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scales as N^0.58 [0.54, 0.61].", "scales as $N^(0.58)$ \\[0.54,\u00a00.61\\]."),
        ("inputs of U[0, 1)", "inputs of U\\[0,\u00a01)"),
        ("area^-0.310, step^0.5", '$A^(-0.310)$, $"step"^(0.5)$'),
        ("8.3e-16 at fp64", "#box[$8.3 times 10^(-16)$] at FP64"),
        ("-0.3 of |D| (p < 0.001)", "−0.3 of $abs(D)$ ($p < 0.001$)"),
        ("Br and Bc, N = 4, FlashAttention-2", "$B_r$ and $B_c$, $N$ = 4, FlashAttention-2"),
    ],
)
def test_mathematics_is_set_as_mathematics(text: str, expected: str) -> None:
    assert typeset(text) == expected
    typst.compile(typeset(text).encode())


@pytest.mark.parametrize("text", ["a_b", "*x*", "#let", "$5", "`a`", "[x]", "a<b>", "c:\\d", "a@b"])
def test_words_from_elsewhere_are_no_markup(text: str) -> None:
    typst.compile(escaped(text).encode())  # raises where the markup is broken
    typst.compile(typeset(text).encode())


def test_a_study_of_speed_has_its_section_figures_and_table(toy_results: Store, tmp_path: Path) -> None:
    """Its results lie in the folder `speed` of the results, as `numdev speed` leaves them."""
    shutil.copytree(toy_results.path / "records", tmp_path / "results" / "records")
    shutil.copytree(toy_results.path / "studies", tmp_path / "results" / "studies")
    problem = Problem(Distribution(), Shape(queries=32, keys=32, head_dim=16))
    points = tuple(
        StudyPoint(problem, variant, None, 1, "normal", {"kernel": name})
        for name, variant in {
            "vanilla": Vanilla(FP32),
            "tiled": Tiled(Precision.parse("fp32")),
            "cudnn": Sdpa(Backend.CUDNN),
        }.items()
    )
    study = Study("speed_cpu", "On a CPU", None, (), points, command="numdev speed study=speed_cpu")
    run(study, speed_bench("cpu", Budget(1e-4, 3, 3)), Store(tmp_path / "results" / "speed"))
    make_report(tmp_path / "results", tmp_path / "out", ["fig3"], console=Console(quiet=True), formats=("pdf",))
    assert (tmp_path / "out" / "report.pdf").read_bytes().startswith(b"%PDF-")
    main, speed = load(Store(tmp_path / "results"), ["fig3"]), load(Store(tmp_path / "results" / "speed"))
    whole = context(
        [Part(main, judge(CLAIMS, main), tmp_path / "out" / "figures"), Part(speed, (), tmp_path / "out" / "figures")], TYPST
    )
    last = whole["sections"][-1]
    assert last["title"] == next(section.title for section in CHAPTERS if section.study == "speed_cpu")
    assert len(last["figures"]) == 3
    assert len({figure["caption"] for figure in last["figures"]}) == 3
    assert [row[2] for row in last["tables"][0]["rows"]] == ["vanilla", "tiled"]
    assert last["command"] == "numdev speed study=speed_cpu device=cpu"
    count = main.points["key"].nunique() + speed.points["key"].nunique()
    assert [group["titles"] for group in whole["environments"]] == [[f"Environment 0, {count} points"]]
    failed = [found for found in whole["failures"] if found[0] == last["title"]]
    assert [found[1:3] for found in failed] == [["normal kernel=cudnn", "unsupported"]]
    assert whole["summary"].startswith(f"{count} points were measured")
