from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from numdev.attention.groups import GROUPS
from numdev.cli import launch, schema
from numdev.cli.compose import Composer
from numdev.cli.main import COMMANDS
from numdev.measurement.metrics import METRICS
from numdev.results.store import Store
from numdev.sources import config_folder
from tests.cli.commands import SMALL, STUDY, Command, jobs, python, refusal


class TestHelp:
    def test_is_quick_and_imports_nothing_heavy(self, tmp_path: Path) -> None:
        script = """if True:
            import sys
            from numdev.cli.main import main
            for command, heavy in ([], {"hydra", "scipy", "numpy"}), (["measure"], set()):
                try: main([*command, "--help"])
                except SystemExit as ended: assert ended.code == 0
                assert not ({"torch", "pandas", "matplotlib", "triton"} | heavy) & set(sys.modules)
            """
        ran = python("-c", script, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert all(f"numdev {command}" in ran.stdout for command in COMMANDS)
        assert max(map(len, ran.stdout.partition("numdev measure: how far")[0].splitlines())) <= 80

    def test_measure_explains_every_group_option_and_setting(self, numdev: Command) -> None:
        ran = numdev("measure", "--help")
        assert ran.code == 0
        whole = ran.out[: ran.out.index("Groups and their options:")]
        assert max(map(len, whole.splitlines())) <= 80
        ours, own = " ".join(whole.split()), Composer((config_folder(),))
        for group in (*GROUPS, "attention", "baseline"):
            assert f"== {group}: " in ours
            for option in own.options(group):
                if re.search(r"numdev\.(training|operations)", str(own.load(f"{group}/{option}"))):  # whose help is its own
                    continue
                assert option.replace("kernel_", "").replace("eager_", "") in ours, f"{group}={option}"
        of_training = " ".join(numdev("train", "--help").out.split())
        for name, one in schema.settings().items():
            text = of_training if name.startswith("rung.") else ours
            said = " ".join((f"{one.unit}: {one.text}" if one.unit else one.text).split())
            assert re.search(rf" {re.escape(name)}=\S* {re.escape(said)}", text), name

    @pytest.mark.parametrize("command", ["speed", "train", "report", "compare", "map"])
    def test_fits_80_columns(self, numdev: Command, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert max(map(len, numdev(command, "--help").out.splitlines())) <= 80


class TestPoint:
    def test_prints_every_metric_and_files_the_record(self, numdev: Command) -> None:
        ran = numdev("measure", *SMALL[:2], "seeds=2", "device=cpu", "metrics=all")
        assert (ran.code, ran.err) == (0, "")
        for metric, (unit, _) in METRICS.items():
            assert re.search(rf"\b{metric} +{unit}\b", ran.out), metric
        assert "ok, 2 replicates" in ran.out
        (found,) = Store(Path("results")).records()
        assert found.key in ran.out
        assert sorted(path.name for path in Path().iterdir()) == ["results"]

    def test_is_not_measured_twice(self, numdev: Command) -> None:
        numdev("measure", *SMALL)
        (before,) = Store(Path("results")).records()
        again = numdev("measure", *SMALL)
        assert "already measured" in again.out
        assert "fresh=true" in again.out
        assert Store(Path("results")).get(before.key) == before
        numdev("measure", *SMALL, "fresh=true")
        (after,) = Store(Path("results")).records()
        assert after.seconds != before.seconds
        assert after.rows == before.rows

    def test_shows_its_settings(self, numdev: Command) -> None:
        ran = numdev("measure", "--cfg", "job", "problem=captured", "tiling.bc=16")
        shown = yaml.safe_load(ran.out)
        assert ran.code == 0
        assert (shown["problem"]["head_dim"], shown["tiling"]["bc"]) == (32, 16)
        assert numdev("measure", "--info", "defaults").code == 0


class TestSweep:
    def test_prints_one_line_for_each_point(self, numdev: Command) -> None:
        ran = numdev("measure", *SMALL, "-m", "precision=bf16,fp16", "tiling.bc=8,16,32")
        assert (ran.code, ran.err) == (0, "")
        title, names, *lines = ran.out.splitlines()
        assert title.startswith("max_difference from golden")
        assert title.endswith("problem.n=32 problem.head_dim=8 seeds=1 device=cpu")
        assert names.split() == ["precision", "tiling.bc", "variant", "baseline", "variant", "/", "baseline", "verdict", "status"]
        assert [tuple(line.split()[:2]) for line in lines] == [(p, bc) for p in ("bf16", "fp16") for bc in ("8", "16", "32")]
        assert len({line.index(" ok, ") for line in lines}) == 1, "columns are aligned"
        assert len(list(Store(Path("results")).records())) == 6
        assert {path.name for path in Path().iterdir()} == {"results"}

    def test_keeps_golden(self, numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        from numdev.attention.exact import Exact

        calls = []
        original = Exact.__call__

        def counted(*arguments: Any, **keywords: Any) -> Any:
            calls.append(1)
            return original(*arguments, **keywords)

        monkeypatch.setattr(Exact, "__call__", counted)
        numdev("measure", *SMALL, "problem.batch=3", "-m", "precision=bf16", "tiling.bc=8,16,32")
        assert len(calls) == 2  # on the unrounded and on the rounded inputs

    def test_a_bad_job_stops_no_other(self, numdev: Command) -> None:
        ran = numdev("measure", *SMALL, "-m", "tiling.bc=0,8,-1,16", "hydra.sweeper.max_batch_size=2")
        assert ran.code == 2
        assert len(jobs(ran.out)) == 2
        assert [line.split(": ")[1] for line in ran.err.splitlines()] == ["tiling.bc", "tiling.bc"]


TOY = ("measure", "--config-dir", "mine", "study=toy")


@pytest.mark.usefixtures("toy_configs")
class TestStudy:
    def test_runs_and_resumes(self, numdev: Command) -> None:
        ran = numdev(*TOY)
        assert ran.code == 0, ran.err
        assert "toy: 6 points, 6 measured" in ran.out
        assert "6/6 points" in ran.err
        again = numdev(*TOY)
        assert "0 measured" in again.out
        assert "6 already there" in again.out
        manifest = Store(Path("results")).studies()["toy"]
        assert manifest["points"][0]["labels"] == {"precision": "bf16", "tiling.bc": 8}

    def test_scenarios_that_the_command_line_contradicts_are_left_out_and_named(self, numdev: Command, own_study: Any) -> None:
        two = "scenarios: {even: {title: uniform inputs, problem: uniform}, bell: {title: normal inputs, problem: normal}}\n"
        own_study(f"title: T\nbase: {{problem.n: 16, problem.head_dim: 4}}\n{two}", "two")
        given = ("measure", "--config-dir", "mine", "study=two", "seeds=1", "device=cpu")
        left_out = "note: two: a scenario is left out, since the command line states other settings: uniform inputs"
        for more in (("dry_run=true",), ()):
            ran = numdev(*given, "problem=normal", *more)
            assert (ran.code, left_out in ran.err) == (0, True), ran.err
        manifest = Store(Path("results")).studies()["two"]
        assert [one["title"] for one in manifest["scenarios"]] == ["normal inputs"]
        assert manifest["overrides"] == []
        sentence = refusal(numdev(*given, "problem=constant"))
        assert "each of its scenarios is about other settings than problem=constant" in sentence

    def test_shards_partition_it(self, numdev: Command) -> None:
        ran = numdev(*TOY, "-m", "shard=range(0,4)")
        assert ran.code == 0
        counts = [int(line.split()[1]) for line in ran.out.splitlines()]
        assert counts == [2, 2, 1, 1]
        assert len(list(Store(Path("results")).records())) == 6

    def test_its_command_finds_it_again(self, numdev: Command) -> None:
        few = ("tiling.bc=8", "precision=bf16")
        ran = numdev(*TOY, *few, "-m", "shard=0,1")
        assert ran.code == 0, ran.err
        command = Store(Path("results")).studies()["toy"]["command"]
        assert command == "numdev measure --config-dir mine study=toy tiling.bc=8 precision=bf16"
        assert "1 already there" in numdev(*command.split()[1:]).out

    def test_studies_lists_them(self, numdev: Command) -> None:
        ran = numdev("studies")
        names = [path.stem for path in (config_folder() / "study").glob("*.yaml")]
        assert [line.split()[0] for line in ran.out.splitlines() if not line.startswith(" ")] == sorted(names)
        assert max(map(len, ran.out.splitlines())) <= 80


class TestPaper:
    @pytest.mark.usefixtures("toy_configs")
    def test_runs_studies_and_reports(self, numdev: Command, own_study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[object, ...]] = []
        report = "numdev.report.document.report.make_report"

        def kept(*arguments: object, formats: object, **_: object) -> bool:
            asked.append((*arguments, formats))
            return True

        monkeypatch.setattr(report, kept)
        own_study(STUDY.replace("bf16, fp16", "fp32"), "other")
        ran = numdev("paper", "--config-dir", "mine", "studies=[toy,other]", "results=r", "out=o", "device=cpu", "tiling.bc=8")
        assert ran.code == 0, ran.err
        assert "3/3 points" in ran.err
        assert (asked[0][0], asked[0][2], asked[0][-1]) == (Path("r"), ["toy", "other"], ("pdf",))


class TestReport:
    @pytest.mark.slow
    @pytest.mark.usefixtures("toy_configs")
    def test_its_folder_is_named_after_what_is_reported(self, numdev: Command, own_study: Any) -> None:
        own_study(STUDY.replace("bf16, fp16", "fp32"), "other")
        few = ("tiling.bc=8", "results=kept/of_may")
        assert numdev("measure", "--config-dir", "mine", "-m", "study=toy,other", *few).code == 0
        for given, folder in ((("study=toy",), "toy"), (("studies=[toy,other]",), "toy_other"), ((), "of_may")):
            ran = numdev("report", "results=kept/of_may", *given)
            assert ran.out.splitlines()[-1] == f"report: reports/{folder}"
        assert {path.name for path in Path("reports").iterdir()} == {"toy", "toy_other", "of_may"}
        assert numdev("report", "results=kept/of_may", "study=toy", "format=pdf").code == 0
        assert Path("reports/toy/report.pdf").is_file()
        assert numdev("report", "results=kept/of_may", "study=toy").code == 0
        assert not Path("reports/toy/report.pdf").exists(), "of tables that are replaced"
        sentence = refusal(numdev("report", "results=kept/of_may", "study=other", "out=reports/toy"))
        assert "it holds the report on toy in kept/of_may" in sentence

    def test_of_the_paper_has_the_studies_of_the_paper(self, numdev: Command, toy_results: Store) -> None:
        assert numdev("report", f"results={toy_results.path}", "study=paper").code == 0
        reported = set(json.loads(Path("reports/paper/report.json").read_text())["studies"])
        assert "fig3" in reported < set(toy_results.studies()) - {"validate"}


def test_an_explicit_number_of_shards_is_kept() -> None:
    assert launch.ordered("measure", ["-m", "shard=0,1"]) == ["shard=0,1", "shards=2", "-m"]
    assert launch.ordered("measure", ["-m", "shard=0,1", "shards=8"]) == ["shard=0,1", "shards=8", "-m"]
    assert launch.ordered("measure", ["shard=1", "shards=8"]) == ["shard=1", "shards=8"]
