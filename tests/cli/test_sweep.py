"""A sweep's jobs, what they return, and how often their configs are read and composed."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from numdev.attention.operation import ATTENTION
from numdev.cli import flags, objective, process, schema, sources
from numdev.cli.jobs import Figure, NoFigure
from numdev.cli.library import config_folder
from numdev.cli.outcome import Ended
from numdev.cli.sweep import ComposedOnce, combinations
from numdev.cli.templates import Templates
from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import Deviations
from numdev.measurement.speed.measurement import Speeds
from numdev.results.record import Column, Record, Status
from tests.cli.test_cli import SMALL, Command, jobs, numdev

__all__ = ["numdev"]  # the fixture


def jobs_of(*texts: str) -> list[tuple[str, ...]]:
    return combinations(OverridesParser.create().parse_overrides(list(texts)))


class TestCombinations:
    @pytest.mark.parametrize(
        "texts",
        [
            ("a=1,2", "b=x"),
            ("a=1,2", "b=range(0,3)", "c=choice(x,y)"),
            ("a=[1,2]", "b={x:1}", "+c=3,4", "~d"),
            ("a=1", "a=2,3"),
            ("group=one,two", "a=glob(t*)", "a='x,y'"),
            (),
        ],
    )
    def test_are_those_of_hydras_own_sweeper(self, texts: tuple[str, ...]) -> None:
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        overrides = OverridesParser.create().parse_overrides([text for text in texts if "glob" not in text])
        (expected,) = BasicSweeper.split_arguments(overrides, None)
        assert [list(job) for job in combinations(overrides)] == expected

    def test_an_interval_lists_nothing(self) -> None:
        with pytest.raises(BadInput, match=r"softmax.p_scale: 'interval\(1,4\)' cannot be used; it lists no values"):
            jobs_of("softmax.p_scale=interval(1,4)")

    def test_batches(self, numdev: Command) -> None:
        ran = numdev("measure", *SMALL, "-m", "tiling.bc=4,8,16", "hydra.sweeper.max_batch_size=2")
        assert (ran.code, len(jobs(ran.out))) == (0, 3)
        ran = numdev("measure", *SMALL, "-m", "tiling.bc=4,8,0", "hydra.sweeper.max_batch_size=2")
        assert (ran.code, len(jobs(ran.out))) == (2, 2)

    def test_params_of_the_sweeper(self, numdev: Command) -> None:
        ran = numdev("measure", *SMALL, "-m", "+hydra.sweeper.params={tiling.bc:'4,8'}")
        assert [line.partition(" ")[0] for line in jobs(ran.out)] == ["4", "8"]


class TestComposing:
    @pytest.fixture
    def composed(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl

        calls: list[tuple[str, ...]] = []
        original = ConfigLoaderImpl.load_sweep_config

        def counted(loader: Any, master_config: Any, sweep_overrides: list[str]) -> Any:
            calls.append(tuple(sweep_overrides))
            return original(loader, master_config, sweep_overrides)

        monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counted)
        return calls

    def test_each_choice_of_groups_once(self, numdev: Command, composed: list[tuple[str, ...]]) -> None:
        ran = numdev("measure", *SMALL, "-m", "tiling.bc=4,8,16", "softmax=fa1,fa2")
        assert (ran.code, len(jobs(ran.out))) == (0, 6)
        assert len(composed) == 2

    def test_each_job_once_where_values_alone_do_not_make_it(self, numdev: Command, composed: list[tuple[str, ...]]) -> None:
        ran = numdev("measure", *SMALL, "-m", "tiling={bc:4},{bc:8},{bc:16}")
        assert (ran.code, len(jobs(ran.out))) == (0, 3)
        assert len(composed) == len(set(composed)) == 3

    @pytest.mark.parametrize(
        "texts",
        [
            ("precision=bf16,fp16", "precision.row_sum=fp32,null", "problem=captured", "results='a b'", "seeds=1"),
            ("problem.scale=0.5,null", "+precision.row_sum=fp32"),
            ("tiling={bc:16},{br:32}", "tiling.br=8", "seeds=1"),
            ("problem.n=8,${tiling.bc}", "tiling.bc=8"),
            ("study=fig3,fig6a", "seeds=1"),
            ("operation=attention,attention_backward", "problem.n=16"),
        ],
    )
    def test_every_job_is_what_hydra_composes(self, texts: tuple[str, ...]) -> None:
        before = ["hydra.job.config.override_dirname.exclude_keys=[seeds]", "hydra.sweep.dir=other"]
        schema.register()
        sources.register()
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            master = loader.load_configuration("config", [*before, *texts], RunMode.MULTIRUN)
            templates = Templates(loader)
            for job in jobs_of(*texts):
                made, expected = templates.job(master, job), loader.load_sweep_config(master, list(job))
                assert made == expected
                assert OmegaConf.to_yaml(made) == OmegaConf.to_yaml(expected)
                assert OmegaConf.is_struct(made)
                assert OmegaConf.to_container(made, resolve=False) == OmegaConf.to_container(expected, resolve=False)

    @pytest.mark.parametrize("text", ["problem.n=many", "tiling.nothing=4", "nothing=4", "softmax=nothing", "+problem.n=4"])
    def test_what_cannot_be_composed_is_refused_by_hydra(self, text: str) -> None:
        schema.register()
        sources.register()
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            master, said = loader.load_configuration("config", [], RunMode.MULTIRUN), []
            for compose in (Templates(loader).job, loader.load_sweep_config):
                with pytest.raises(HydraException) as raised:
                    compose(master, ["seeds=1", text])
                said.append(str(raised.value))
            assert said[0] == said[1]

    def test_each_file_once(self, numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[str] = []
        original = OmegaConf.load

        def counted(file: Any) -> Any:
            if not isinstance(file, Path):  # so reads the library of studies
                read.append(str(file.name))
            return original(file)

        sources._read.cache_clear()
        monkeypatch.setattr(OmegaConf, "load", counted)
        assert numdev("measure", *SMALL, "-m", "tiling.bc=4,8,16", "softmax=fa1,fa2").code == 0
        ours = [path for path in read if path.startswith(str(config_folder()))]
        assert len(ours) == len(set(ours))
        assert {str(config_folder() / f"softmax/{name}.yaml") for name in ("fa1", "fa2")} < set(ours)

    def test_a_file_that_changed_is_read_again(self, tmp_path: Path) -> None:
        source = sources.FolderSource("main", f"numdev://{tmp_path}")
        path = tmp_path / "leaf.yaml"
        path.write_text("# @package other\na: 1\n")
        first = source.load_config("leaf")
        assert (first.config["a"], first.header["package"]) == (1, "other")
        first.config["a"] = 5
        assert source.load_config("leaf").config["a"] == 1, "what Hydra does to its copy stays there"
        path.write_text("a: 22\n")
        assert source.load_config("leaf").config["a"] == 22

    def test_a_loader_for_another_process_brings_no_configs(self) -> None:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

        held = ComposedOnce(ConfigLoaderImpl(ConfigSearchPathImpl()))
        held.composed["a=1",] = OmegaConf.create({"a": 1})
        assert pickle.loads(pickle.dumps(held)).composed == {}
        assert len(held.composed) == 1


class TestSource:
    def test_lists_and_finds_as_hydras_own(self, tmp_path: Path) -> None:
        from hydra._internal.core_plugins.file_config_source import FileConfigSource
        from hydra.core.object_type import ObjectType

        ours = sources.FolderSource("main", f"numdev://{config_folder()}")
        theirs = FileConfigSource("main", f"file://{config_folder()}")
        for wanted in (None, ObjectType.GROUP, ObjectType.CONFIG):
            for group in ("", "softmax", "hydra"):
                assert ours.list(group, wanted) == theirs.list(group, wanted)
        for name in ("softmax", "softmax/fa2", "config", "nothing", "softmax/nothing"):
            assert (ours.is_group(name), ours.is_config(name)) == (theirs.is_group(name), theirs.is_config(name))
        for name in ("config", "softmax/fa2", "hydra/help/measure"):
            assert ours.load_config(name).config == theirs.load_config(name).config
            assert ours.load_config(name).header == theirs.load_config(name).header

    def test_an_absent_file(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="not found"):
            sources.FolderSource("main", f"numdev://{tmp_path}").load_config("leaf")


class TestFlags:
    def test_are_those_of_hydra(self) -> None:
        def of(parser: Any) -> dict[tuple[str, ...], Any]:
            return {tuple(a.option_strings): a.nargs for a in parser._actions if a.option_strings}

        assert of(flags.parser()) == of(get_args_parser())

    def test_split(self) -> None:
        texts = ["a=1", "-m", "--config-dir", "mine", "b=2", "-cn", "other", "c=3", "--info", "defaults"]
        assert flags.split("measure", texts) == (
            ["a=1", "b=2", "c=3"],
            ["-m", "--config-dir", "mine", "-cn", "other", "--info", "defaults"],
        )


class TestProcess:
    def test_is_put_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THERE", "before")
        monkeypatch.delenv("ABSENT", raising=False)
        before = sys.argv

        def failing() -> None:
            with process.given(["a"], THERE="x", ABSENT="y"):
                assert (sys.argv, os.environ["THERE"], os.environ["ABSENT"]) == ([before[0], "a"], "x", "y")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            failing()
        assert sys.argv is before
        assert os.environ["THERE"] == "before"
        assert "ABSENT" not in os.environ


class TestReturned:
    def test_crosses_processes(self) -> None:
        ended = Ended(3, "why", 0.5, "a=1", 7, "line\n")
        figure = pickle.loads(pickle.dumps(Figure(0.5, ended)))
        assert (figure, figure.ended) == (0.5, ended)
        assert pickle.loads(pickle.dumps(NoFigure(ended))).ended == ended

    def test_an_error_nobody_thought_of_stops_no_other_job(self, numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        from numdev.cli import build

        original = build.point

        def point(request: Any, *arguments: Any) -> Any:
            if request.config["tiling"]["bc"] == 8:
                raise ZeroDivisionError("deliberate")
            return original(request, *arguments)

        monkeypatch.setattr(build, "point", point)
        ran = numdev("measure", *SMALL, "-m", "tiling.bc=4,8,16")
        assert (ran.code, len(jobs(ran.out))) == (1, 2)
        assert ran.err.endswith("numdev failed: ZeroDivisionError: deliberate; HYDRA_FULL_ERROR=1 shows where\n")
        assert len(ran.err.splitlines()) == 1

    def test_also_through_hydras_own_sweeper(self, numdev: Command) -> None:
        ran = numdev("measure", *SMALL, "-m", "hydra/sweeper=basic", "tiling.bc=0,8")
        assert (ran.code, len(jobs(ran.out)), len(ran.err.splitlines())) == (2, 1, 1)


class TestObjective:
    ROWS = (
        {"subject": "variant", "reference": "golden", "output": "out", "rmse": 1.0, "seed": 0},
        {"subject": "variant", "reference": "golden", "output": "out", "rmse": 2.0, "seed": 1},
        {"subject": "variant", "reference": "golden", "output": "lse", "rmse": 7.0, "seed": 0},
        {"subject": "variant", "reference": "baseline", "output": "out", "rmse": 9.0, "seed": 0},
    )

    @staticmethod
    def record(rows: Sequence[Any]) -> Record:
        columns: dict[str, tuple[Column, ...]] = {"deviation": (Column("rmse", "absolute"),)}
        tables: dict[str, list[Any]] = {"deviation": list(rows)}
        return Record("k", "deviation", "attention", ("out", "lse"), columns, {}, {}, Status.OK, tables=tables)

    def test_is_the_mean_over_seeds_against_golden(self) -> None:
        found = self.record(self.ROWS)
        assert objective.value("out.rmse", found) == 1.5
        assert objective.value("lse.rmse", found) == 7.0
        assert objective.value("rmse", found) == 1.5
        assert objective.value(None, found) is None
        assert objective.value("out.rmse", self.record([])) is None

    def test_nan_is_no_figure(self) -> None:
        rows = [self.ROWS[0] | {"rmse": float("nan")}, self.ROWS[1]]
        assert objective.value("out.rmse", self.record(rows)) is None

    def test_of_an_output_that_is_not_there(self) -> None:
        with pytest.raises(BadInput, match=r"objective: 'lze.rmse' cannot be used; .* did you mean lse.rmse"):
            objective.value("lze.rmse", self.record(self.ROWS))

    def test_names_are_of_the_operation_and_of_the_kind(self) -> None:
        deviations, speeds = Deviations(ATTENTION), Speeds(ATTENTION)
        assert {"out.rmse", "lse.max_ulp"} < set(objective.names(deviations))
        assert {"latency", "tflops", "rmse"} < set(objective.names(speeds))
        assert "l2_bytes" not in objective.names(speeds), "counted only where that is asked for"
        assert not {"seed", "out.seed", "out.max_index", "algorithm"} & {*objective.names(deviations), *objective.names(speeds)}
        with pytest.raises(BadInput, match=r"objective: 'y.rmse' cannot be used; did you mean .*out.rmse"):
            objective.refuse_unusable("y.rmse", deviations)

    def test_belongs_to_one_point(self, numdev: Command) -> None:
        for command, words in (("measure", "study=fig3"), ("paper", "studies=[fig3]")):
            ran = numdev(command, words, "objective=out.rmse")
            assert (ran.code, len(ran.err.splitlines())) == (2, 1)
            assert ran.err.startswith("objective: 'out.rmse' cannot be used; ")
