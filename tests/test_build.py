from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from numdev.api import baseline_for
from numdev.attention.custom import Custom
from numdev.attention.exact import Exact
from numdev.attention.flex import Flex
from numdev.attention.instrumented import Instrumented
from numdev.attention.naive import Naive
from numdev.attention.sdpa import Sdpa
from numdev.attention.tiled import Tiled
from numdev.attention.triton import Triton
from numdev.attention.vanilla import Vanilla
from numdev.captured import Captured
from numdev.cli import build, variants
from numdev.cli.expand import Expander
from numdev.cli.library import Library, config_folder
from numdev.cli.settings import nested
from numdev.distributions import Distribution, Kind
from numdev.errors import BadInput
from numdev.formats import BF16, E5M2, FP32
from numdev.mask import Mask
from numdev.precision import Dot, Precision
from numdev.problem import Problem, Shape
from numdev.quantise import Quantised, Scale, Smoothing
from numdev.rounding import Cast
from numdev.softmax import Exponential, Normalise, OnlineSoftmax
from numdev.tiling import Loop, Order, Tiling

LIBRARY = Library((config_folder(),))
EXPANDER = Expander(LIBRARY)


def config(**choices_and_values: Any) -> dict[str, Any]:
    """The default configuration with changes; `tiling__bc=16` is `tiling.bc=16`."""
    return EXPANDER.config({key.replace("__", "."): value for key, value in choices_and_values.items()})


def variant(**changes: Any) -> Any:
    return variants.attention(config(**changes))


class TestLeavesAgreeWithPython:
    @pytest.mark.parametrize("name", LIBRARY.options("precision"))
    def test_precision(self, name: str) -> None:
        assert build.precision(config(precision=name)["precision"]) == Precision.parse(name)
        assert LIBRARY.leaf("precision", name) == {"preset": name}

    def test_every_preset_has_a_leaf(self) -> None:
        formats = ("fp64", "fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3fn")
        presets = {"golden", "fp8", "int8", *formats, *(f"{kind}_{fmt}" for kind in ("eager", "kernel") for fmt in formats)}
        assert set(LIBRARY.options("precision")) == presets

    @pytest.mark.parametrize("kind", list(Kind))
    def test_problem(self, kind: Kind) -> None:
        built = build.problem(config(problem=kind.value)["problem"])
        assert built == Problem(Distribution(kind), Shape(queries=1024, keys=1024, head_dim=64))

    def test_captured(self) -> None:
        built = build.problem(config(problem="captured")["problem"])
        assert built == Problem(Captured("minilm"), Shape(queries=256, keys=256, head_dim=32))

    def test_every_distribution_has_a_leaf(self) -> None:
        assert set(LIBRARY.options("problem")) == {*(kind.value for kind in Kind), build.CAPTURED}

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("fa1", OnlineSoftmax(Normalise.EACH)),
            ("fa2", OnlineSoftmax()),
            ("fa3_fp8", OnlineSoftmax(exp=Exponential.EXP2, p_scale=256.0)),
            ("fa4", OnlineSoftmax(exp=Exponential.POLYNOMIAL_3, rescale_threshold=8.0)),
        ],
    )
    def test_softmax(self, name: str, expected: OnlineSoftmax) -> None:
        assert build.softmax(config(softmax=name)["softmax"]) == expected

    def test_tiling(self) -> None:
        assert build.tiling(config()["tiling"], 64) == Tiling()

    @pytest.mark.parametrize("name", LIBRARY.options("attention"))
    def test_attention(self, name: str) -> None:
        kinds = {"tiled": Tiled, "naive": Naive, "exact": Exact, "custom": Custom, "triton": Triton, "sdpa": Sdpa, "flex": Flex}
        kinds |= {"instrumented": Instrumented, "vanilla": Vanilla}
        built = variant(attention=name, attention__function="tests.test_build:some_attention")
        assert type(built) is kinds[name]

    def test_settings_are_the_fields_of_the_objects(self) -> None:
        settings = config()
        assert set(settings["softmax"]) == {field.name for field in fields(OnlineSoftmax)}
        assert set(settings["tiling"]) == {*(field.name for field in fields(Tiling)), "sram", "shape"}
        assert set(settings["precision"]) == {*(field.name for field in fields(Precision)), "preset", "quantise"}
        assert set(settings["precision"]["quantise"]) == {field.name for field in fields(Quantised)}
        sizes = {field.name for field in fields(Shape)} | {field.name for field in fields(Mask)}
        assert set(settings["problem"]) == {*sizes, "n", "scale", "source"}


def some_attention(q: Any, k: Any, v: Any, mask: Mask, scale: float) -> Any:
    return v


class TestProblem:
    def test_n_is_queries_and_keys(self) -> None:
        shape = build.problem(config(problem__n=96, problem__keys=128)["problem"]).shape
        assert (shape.queries, shape.keys) == (96, 128)

    def test_kv_heads_are_heads_unless_given(self) -> None:
        assert build.problem(config(problem__heads=4)["problem"]).shape.kv_heads == 4
        assert build.problem(config(problem__heads=4, problem__kv_heads=2)["problem"]).shape.kv_heads == 2

    def test_mask_and_scale(self) -> None:
        changes = {"problem.causal": True, "problem.window": 8, "problem.key_lengths": [5, 7], "problem.batch": 2}
        built = build.problem(EXPANDER.config(changes, {"problem.scale": 2})["problem"])
        assert (built.mask, built.scale) == (Mask(True, 8, (5, 7)), 2.0)

    def test_a_file_belongs_to_captured(self) -> None:
        with pytest.raises(BadInput, match=r"problem\.source\.path: 'x\.pt' .*only problem=captured"):
            build.problem(config(problem__source__path="x.pt")["problem"])
        with pytest.raises(BadInput, match=r"problem\.source\.parameter: 3\.0"):
            build.problem(EXPANDER.config({"problem": "captured", "problem.source.parameter": 3})["problem"])


class TestPrecision:
    @pytest.mark.parametrize("step", [field.name for field in fields(Precision)])
    def test_every_step_can_be_overridden(self, step: str) -> None:
        text = "e4m3fn:toward_zero:saturate"
        built = build.precision(EXPANDER.config({"precision": "kernel_bf16", f"precision.{step}": text})["precision"])
        base = Precision.parse("kernel_bf16")
        changed = {field.name for field in fields(Precision) if getattr(built, field.name) != getattr(base, field.name)}
        assert changed == {step}
        assert built.steps()[step] == text

    def test_products_take_a_number_of_products(self) -> None:
        built = build.precision(config(precision__values="fp32@16")["precision"])
        assert built.values == Dot(Cast(FP32), 16)

    @pytest.mark.parametrize("step", [field.name for field in fields(Precision)])
    def test_a_bad_cast_names_the_step(self, step: str) -> None:
        with pytest.raises(BadInput, match=rf"^precision\.{step}: 'bf17' cannot be used; use one of fp64") as error:
            build.precision(EXPANDER.config({f"precision.{step}": "bf17"})["precision"])
        assert error.value.field == f"precision.{step}"

    def test_any_format_is_a_preset(self) -> None:
        assert build.precision(config(precision__preset="e8m10")["precision"]) == Precision.parse("e8m10")

    def test_quantised_fields(self) -> None:
        changes = {"scale": "row", "block": 32, "hadamard": False, "smoothing": "qk", "values": "bf16", "seed": 7, "to": "e5m2"}
        layer = {f"precision.quantise.{name}": value for name, value in changes.items()}
        inputs = build.precision(EXPANDER.config({"precision": "fp8"} | layer)["precision"]).inputs
        assert inputs == Quantised(Cast(E5M2), Scale.ROW, 32, False, Smoothing.QK, Cast(BF16), 7)

    def test_one_quantised_field_leaves_the_others(self) -> None:
        built = build.precision(EXPANDER.config({"precision": "int8", "precision.quantise.values": "same"})["precision"])
        base = Precision.int8().inputs
        assert isinstance(base, Quantised)
        assert built.inputs == Quantised(base.to, base.scale, base.block, base.hadamard, base.smoothing, None, base.seed)

    def test_plain_inputs_become_quantised(self) -> None:
        layer = {"precision": "eager_fp16", "precision.inputs": "e4m3fn", "precision.quantise.scale": "tensor"}
        assert build.precision(EXPANDER.config(layer)["precision"]).inputs == Quantised(Cast.parse("e4m3fn"))

    def test_a_cast_takes_the_quantisation_away(self) -> None:
        built = build.precision(EXPANDER.config({"precision": "fp8", "precision.inputs": "bf16"})["precision"])
        assert built.inputs == Cast(BF16)


class TestTiling:
    def test_fields(self) -> None:
        changes = {"br": 16, "bc": 32, "order": "strided", "loop": "keys", "splits": 2, "stride": 4, "seed": 9}
        layer = {f"tiling.{name}": value for name, value in changes.items()}
        built = build.tiling(EXPANDER.config(layer)["tiling"], 64)
        assert built == Tiling(16, 32, Order.STRIDED, Loop.KEYS, 2, 4, 9)

    @pytest.mark.parametrize(
        ("shape", "sides"),
        [("as_is", (64, 128)), ("swapped", (128, 64)), ("square", (91, 91)), ("square_bc", (128, 128))],
    )
    def test_sram_then_shape(self, shape: str, sides: tuple[int, int]) -> None:
        layer = {"tiling.sram": 128 * 4 * 64, "tiling.shape": shape, "tiling.order": "reverse"}
        built = build.tiling(EXPANDER.config(layer)["tiling"], 64)
        assert (built.br, built.bc) == sides
        assert built.order is Order.REVERSE

    def test_sram_and_a_side_contradict_each_other(self) -> None:
        with pytest.raises(BadInput, match=r"tiling\.bc: 16 .*tiling\.sram=4096 gives the sides"):
            variant(tiling__sram=4096, tiling__bc=16)

    def test_sram_follows_head_dim(self) -> None:
        assert variant(problem__head_dim=32, tiling__sram=4096).tiling.bc == 32


class TestAttention:
    def test_tiled(self) -> None:
        built = variant(precision="kernel_fp16", tiling__bc=16, softmax="fa1", attention__count=False)
        assert built == Tiled(Precision.parse("kernel_fp16"), Tiling(bc=16), OnlineSoftmax(Normalise.EACH), count=False)

    def test_naive(self) -> None:
        built = variant(attention="naive", attention__normalise="end", precision="fp16")
        assert built == Naive(Precision.parse("fp16"), Normalise.END)

    def test_custom(self) -> None:
        built = variant(attention="custom", attention__function="tests.test_build:some_attention", attention__format="fp32")
        assert built == Custom("tests.test_build:some_attention", FP32)

    def test_custom_from_the_current_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "attention_of_mine.py").write_text("def all_of_v(q, k, v, mask, scale):\n    return v\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", ["/nowhere"])
        assert variant(attention="custom", attention__function="attention_of_mine:all_of_v").format == BF16

    def test_unknown(self) -> None:
        with pytest.raises(BadInput, match=r"attention\.kind: 'tritom' .*did you mean triton"):
            variant(attention__kind="tritom")


class TestBaseline:
    @pytest.mark.parametrize(
        ("layer", "expected"),
        [
            ({}, baseline_for(BF16)),
            ({"baseline": "eager"}, baseline_for(BF16)),
            ({"baseline": "uniform"}, Naive(Precision.uniform(BF16))),
            ({"baseline": "none"}, None),
            ({"baseline.precision": "kernel_fp32"}, Naive(Precision.parse("kernel_fp32"))),
            ({"baseline.normalise": "end"}, Naive(baseline_for(BF16).precision, Normalise.END)),
        ],
    )
    def test_choices(self, layer: dict[str, str], expected: Naive | None) -> None:
        assert build.point(EXPANDER.config(layer)).baseline == expected

    def test_follows_the_output_format(self) -> None:
        point = build.point(EXPANDER.config({"precision": "kernel_bf16", "precision.output": "fp16", "baseline": "uniform"}))
        assert point.baseline == Naive(Precision.parse("fp16"))

    def test_unknown(self) -> None:
        with pytest.raises(BadInput, match=r"baseline\.precision: 'bf17' .*or uniform, none, null"):
            build.point(EXPANDER.config({"baseline.precision": "bf17"}))


def test_point_carries_seeds_setting_and_labels() -> None:
    point = build.point(config(seeds=3), "here", {"problem.n": 1024})
    assert (point.seeds, point.scenario, point.labels) == (3, "here", {"problem.n": 1024})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tiling.order", "sideways"),
        ("tiling.loop", "rows"),
        ("tiling.shape", "round"),
        ("softmax.normalise", "never"),
        ("softmax.exp", "exp3"),
        ("softmax.scale_on", "values"),
        ("precision.quantise.scale", "column"),
        ("precision.quantise.smoothing", "v"),
        ("baseline.normalise", "never"),
        ("problem.source.kind", "gauss"),
    ],
)
def test_every_choice_names_its_setting_and_what_there_is(path: str, value: str) -> None:
    layer = {path: value}
    with pytest.raises(BadInput, match=rf"^{path}: '{value}' cannot be used; (did you mean|use one of) ") as error:
        build.point(EXPANDER.config(layer))
    assert error.value.field == path


def test_building_changes_no_setting() -> None:
    settings = config(precision="fp8", precision__quantise__scale="row")
    before = deepcopy(settings)
    build.point(settings)
    assert settings == before
    assert nested({"a.b.c": 1, "a.d": 2}) == {"a": {"b": {"c": 1}, "d": 2}}
