"""The command that the explorer shows is the point that it measured."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import save_file

from numdev.api import bench
from numdev.attention.emulation import baseline_for
from numdev.attention.problem import Kind
from numdev.cli import build, expand
from numdev.cli.compose import composer, register
from numdev.errors import BadInput
from numdev.explorer.view import PRESETS, SOURCES, View, measured
from numdev.sources import config_folder

LIBRARY = composer((config_folder(),))


def key_of_command(command: str) -> str:
    """The key under which the command line files the point of a command."""
    program, measure, *overrides = shlex.split(command)
    assert (program, measure) == ("numdev", "measure")
    register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = compose("config", overrides, return_hydra_config=True)
    hydra = cfg.hydra
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    point = build.point(expand.expander(hydra, cfg).request())
    return bench(cfg.device).key(point.problem, point.variant, point.baseline, point.seeds)


def key_of(view: View) -> str:
    return bench("cpu").key(view.problem, view.variant, baseline_for(view.variant.format), view.seeds)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "fp8", "problem.causal": True, "seeds": 2},
        {"precision": "e8m10", "precision.row_sum": "fp32@16", "precision.output": "bf16:toward_zero"},
        {"precision": "int8", "precision.quantise.scale": "row", "tiling.bc": 32, "tiling.order": "outside_in"},
        {"tiling.bc": 64, "tiling.order": "forward", "softmax.normalise": "each", "softmax.exp": "exp2_poly3@0.25"},
        {"tiling.sram": 8192, "softmax.exp": "exp2"},
        {"problem": "captured"},
        {"problem": "captured", "problem.n": 100, "problem.source.layer": "layer5", "precision.inputs": "e4m3fn:saturate"},
        *({"problem": kind.value} for kind in Kind),
    ],
    ids=str,
)
def test_the_command_expands_to_the_point_of_the_view(settings: dict[str, Any]) -> None:
    view = View.of({"problem.n": 64, **settings} if settings.get("problem") != "captured" else settings)
    assert key_of_command(view.command) == key_of(view)


def test_presets_and_sources_are_options_of_the_command_line() -> None:
    assert set(PRESETS) <= set(LIBRARY.options("precision"))
    assert sorted(SOURCES) == LIBRARY.options("problem")


def test_a_file_of_any_shape_and_name_is_measured_by_its_command(tmp_path: Path) -> None:
    """Grouped queries, tokens and head_dim of its own; a name that a shell and Hydra would both take apart."""
    path = tmp_path / "my 'first', file=1.safetensors"
    heads = {"q": 4, "k": 2, "v": 2}
    save_file({f"layer.{name}": torch.randn(count, 24, 64) for name, count in heads.items()}, path)
    view = View.of({"problem": "captured", "problem.source.path": str(path), "seeds": 2})
    assert (view.problem.shape.heads, view.problem.shape.kv_heads, view.problem.shape.keys) == (2, 1, 24)
    assert key_of_command(view.command) == key_of(view)


def test_what_is_drawn_is_the_replicate_of_the_record() -> None:
    """Also where rounding is random: each replicate draws anew."""
    view = View.of({"problem.n": 32, "precision.accumulator": "bf16:stochastic", "seeds": 2})
    for seed in range(2):
        found = measured(view, seed)
        [row] = [
            row
            for row in found.record.rows
            if (row["seed"], row["subject"], row["reference"], row["output"]) == (seed, "variant", "golden", "out")
        ]
        assert (found.out - found.golden).abs().max() == row["max_difference"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"precision.row_sums": "bf16"}, "precision.row_sums: 'bf16' cannot be used; .*did you mean precision.row_sum"),
        ({"precision.scores": "e99"}, "precision.scores: 'e99' cannot be used"),
        ({"problem": "unifrom"}, "problem: 'unifrom' cannot be used; did you mean uniform"),
        ({"problem.source.df": 3.0}, "problem.source.df: 3.0 cannot be used; there is no such setting"),
        ({"problem": "captured", "problem.source.layer": "layer9"}, "problem.source.layer: 'layer9' .*layer0"),
        ({"problem.n": 0}, "problem.queries: 0"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_named_as_on_the_command_line(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        View.of(settings)


def test_a_replicate_that_is_not_measured_is_refused() -> None:
    with pytest.raises(BadInput, match="seed: 3 .*0 to 2"):
        measured(View.of({"problem.n": 32}), 3)
