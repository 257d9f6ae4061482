"""Configurations as Hydra composes them, and layers of statements above them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from numdev.cli import build
from numdev.cli.compose import (
    Composer,
    PresetSource,
    Request,
    make_importable,
    plain,
    register,
    resolved,
)
from numdev.cli.schema import nested
from numdev.errors import BadInput, NotHonoured
from numdev.settings import flat
from numdev.sources import config_folder

FOLDERS = (config_folder(),)
COMPOSER = Composer(FOLDERS)
# The statements of a layer, by what they set: two groups whose files state settings, and values in and outside of these.
CHOICES: dict[str, list[Any]] = {
    "problem": ["uniform", "captured", "tied"],
    "softmax": ["fa1", "fa2", "fa4"],
    "precision": ["bf16", "kernel_fp16"],
}
VALUES: dict[str, list[Any]] = {
    "problem.n": [16, 32, 64],
    "problem.scale": [0.5, None],
    "tiling.bc": [8, 16],
    "softmax.p_scale": [2.0, 4.0],
    "softmax.maximum": ["running", "local"],
    "precision.values": ["fp32", "bf16@4", None],
}
LAYER = st.dictionaries(st.sampled_from([*CHOICES, *VALUES]), st.integers(0, 5), max_size=4)


def stated(drawn: dict[str, int]) -> dict[str, Any]:
    every = CHOICES | VALUES
    return {name: every[name][place % len(every[name])] for name, place in drawn.items()}


def expected(layers: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The value that each stated setting has, and what states it, by reading the layers from the last one."""
    settings, by = dict[str, Any](), dict[str, str]()
    options = {group: max((i for i, layer in enumerate(layers) if group in layer), default=-1) for group in CHOICES}
    for i, layer in reversed(list(enumerate(layers))):
        for key, value in layer.items():
            if key in VALUES and key not in settings:
                settings[key], by[key] = value, key
        for group in (group for group, last in options.items() if last == i):
            for key, value in COMPOSER.leaf(group, layer[group]).items():
                if key not in settings:
                    settings[key], by[key] = value, group
    return settings, by


class TestLayers:
    @given(st.lists(LAYER, max_size=4))
    def test_the_last_statement_counts_and_an_option_states_what_its_file_holds(self, drawn: list[dict[str, int]]) -> None:
        layers = [stated(one) for one in drawn]
        settings, by = expected(layers)
        try:
            request = COMPOSER.request(*layers)
        except NotHonoured:  # values of one layer leave nothing of an option that the layer chooses
            return
        nodes = {key for key in settings if "._" in key}
        assert {key: request.raw[key] for key in settings} == settings
        explicit = {key for key, value in settings.items() if value is not None and key not in nodes}
        assert {key for key in request.said if "." in key} == explicit
        assert {key: request.said[key].name for key in explicit} == {key: by[key] for key in explicit}
        unstated = {key: value for key, value in request.raw.items() if key not in settings}
        defaults = COMPOSER.values(request.options)
        assert unstated == {key: defaults[key] for key in unstated}

    @pytest.mark.parametrize(
        "task",
        [
            {},
            {"problem": "captured", "precision": "kernel_fp16", "tiling.bc": 16, "precision.values": "fp32@16"},
            {"precision": "e8m10", "softmax": "fa4", "problem.n": 48, "problem.causal": True},
        ],
    )
    def test_agrees_with_what_hydra_composes(self, task: dict[str, Any]) -> None:
        register()
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            config = plain(compose("config", [f"{key}={value}" for key, value in task.items()]))
        by_hydra, ours = build.point(Request(COMPOSER, dict(flat(config)), {}, {})), build.point(COMPOSER.request(task))
        assert (ours.problem, ours.variant, ours.baseline) == (by_hydra.problem, by_hydra.variant, by_hydra.baseline)

    def test_an_option_of_a_later_layer_replaces_a_node_with_its_settings(self) -> None:
        below = {"problem": "normal_logits", "problem.source.std": 8.0}
        request = COMPOSER.request(below, {"problem": "uniform"})
        assert "problem.source.std" not in {*request.raw, *request.said}
        with pytest.raises(NotHonoured, match=r"^problem\.source\.std: 8\.0 .*problem=normal does not read it"):
            build.point(COMPOSER.request({"problem": "normal", "problem.source.std": 8.0}))


class TestReferences:
    def test_relative_and_chained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BC", "48")
        settings = {"a.b": 1, "a.c": "${.b}", "d": "${a.c}", "a.e.f": "${..b}", "g": "text", "h": "${a}"}
        node = {"b": 1, "c": 1, "e": {"f": 1}}
        assert resolved(nested(settings)) == {"a": node, "d": 1, "g": "text", "h": node}
        assert resolved({"x": "${oc.decode:${oc.env:BC}}"}) == {"x": 48}

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"a.b": "${a.c}"}, "a.b: .*'a.c' not found"),
            ({"a.b": "${a.c}", "a.c": "${a.b}"}, "Recursive"),
            ({"a.b": "${oc.env:NOT_SET_ANYWHERE}"}, "a.b: .*NOT_SET_ANYWHERE"),
        ],
    )
    def test_to_nothing(self, settings: dict[str, Any], words: str) -> None:
        with pytest.raises(BadInput, match=words):
            resolved(nested(settings))


class TestFiles:
    def test_the_first_folder_that_has_a_file_counts(self, tmp_path: Path) -> None:
        (tmp_path / "study").mkdir()
        (tmp_path / "study" / "mine.yaml").write_text("title: Mine\n")
        library = Composer((config_folder(), tmp_path))
        assert library.study("mine")["title"] == "Mine"
        assert "mine" in library.options("study")
        with pytest.raises(BadInput, match="study: 'thine' .*did you mean mine"):
            library.study("thine")

    @pytest.mark.parametrize(
        ("name", "there"),
        [("e8m10", True), ("kernel_e5m7", True), ("uniform_bf16", True), ("bf17", False), ("mine_bf16", False), ("Bf16", False)],
    )
    def test_a_format_is_an_option_of_precision_without_a_file(self, name: str, there: bool) -> None:
        source = PresetSource("numdev", "numdev://presets")
        assert source.is_config(f"precision/{name}") is there
        assert not source.is_config(f"softmax/{name}")
        if there:
            assert source.load_config(f"precision/{name}").config == {"preset": name}
            assert COMPOSER.request({"precision": name}).raw["precision.preset"] == name

    def test_modules_of_the_user_are_importable_behind_everything_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From the working directory, the config folder and the one around it, and from no folder of numdev or Hydra."""
        here, folder = tmp_path / "here", tmp_path / "mine" / "configs"
        here.mkdir()
        folder.mkdir(parents=True)
        monkeypatch.chdir(here)
        monkeypatch.setattr(sys, "path", ["/nowhere"])
        places = {"main": "/numdev/configs", "hydra": "hydra.conf", "command-line": str(folder)}
        sources = [SimpleNamespace(provider=provider, path=path) for provider, path in places.items()]
        make_importable(sources)
        make_importable(sources)
        assert sys.path == ["/nowhere", str(here), str(folder), str(folder.parent)]
