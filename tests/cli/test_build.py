from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from numdev.api import baseline_for
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, E5M2, FP32
from numdev.arithmetic.microscale import MICROSCALED, Microscaled
from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.shipped import SHIPPED
from numdev.attention.softmax import EXPONENTIALS, FA4_COEFFICIENTS, Exponential, Maximum, Normalise, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.cli import build, variants
from numdev.cli.expand import Expander
from numdev.cli.library import Library, config_folder
from numdev.cli.settings import Request, nested
from numdev.errors import BadInput

LIBRARY = Library((config_folder(),))
EXPANDER = Expander(LIBRARY)


def config(**choices_and_values: Any) -> Mapping[str, Any]:
    """The default configuration with changes; `tiling__bc=16` is `tiling.bc=16`."""
    return request(**choices_and_values).config


def request(**choices_and_values: Any) -> Request:
    return EXPANDER.request({key.replace("__", "."): value for key, value in choices_and_values.items()})


def variant(**changes: Any) -> Any:
    return variants.attention(config(**changes))


FLASH_1 = OnlineSoftmax(Normalise.EACH, maximum=Maximum.LOCAL)


class TestLeavesAgreeWithPython:
    @pytest.mark.parametrize("name", LIBRARY.options("precision"))
    def test_precision(self, name: str) -> None:
        assert build.precision(config(precision=name)["precision"]) == Precision.parse(name)
        assert LIBRARY.leaf("precision", name) == {"preset": name}

    def test_every_preset_has_a_leaf(self) -> None:
        formats = ("fp64", "fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3fn")
        presets = {"golden", *SHIPPED, *formats, *(f"{kind}_{fmt}" for kind in ("eager", "kernel") for fmt in formats)}
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
            ("fa1", FLASH_1),
            ("fa1_running", OnlineSoftmax(Normalise.EACH)),
            ("fa2", OnlineSoftmax()),
            ("fa2_kernel", OnlineSoftmax(exp=Exponential.EXP2)),
            ("fa3", OnlineSoftmax(exp=Exponential.EXP2)),
            ("fa3_fp8", OnlineSoftmax(exp=Exponential.EXP2, p_scale=256.0)),
            ("fa4", OnlineSoftmax(exp=Exponential.parse("exp2_fa4"), rescale_threshold=8.0)),
            ("fa4_fp8", OnlineSoftmax(exp=Exponential.parse("exp2_fa4_fp8"), p_scale=256.0)),
            ("cudnn", OnlineSoftmax(exp=Exponential.EXP2)),
            ("sage1", OnlineSoftmax(exp=Exponential.EXP2)),
            ("sage2", OnlineSoftmax(exp=Exponential.EXP2, p_scale=448.0)),
            ("sage2_int4", OnlineSoftmax(exp=Exponential.EXP2, p_scale=448.0)),
            ("sage3", OnlineSoftmax(exp=Exponential.EXP2, p_scale=2688.0)),
        ],
    )
    def test_softmax(self, name: str, expected: OnlineSoftmax) -> None:
        assert build.softmax(config(softmax=name)["softmax"]) == expected

    def test_tiling(self) -> None:
        assert build.tiling(config()["tiling"], 64) == Tiling()

    @pytest.mark.parametrize(
        ("name", "br", "bc", "order"),
        [
            ("fa2_kernel", 128, 64, Order.REVERSE),
            ("fa3", 128, 176, Order.REVERSE),
            ("fa3_fp8", 128, 224, Order.REVERSE),
            ("fa4", 128, 128, Order.REVERSE),
            ("fa4_fp8", 128, 128, Order.REVERSE),
            ("sage1", 128, 64, Order.FORWARD),
            ("sage2", 64, 128, Order.FORWARD),
            ("sage2_int4", 128, 64, Order.FORWARD),
            ("sage3", 128, 128, Order.REVERSE),
        ],
    )
    def test_published_tiles(self, name: str, br: int, bc: int, order: Order) -> None:
        assert build.tiling(config(tiling=name)["tiling"], 128) == Tiling(br, bc, order)

    @pytest.mark.parametrize("name", [name for name in SHIPPED if name not in ("fp8", "int8")])
    def test_a_quantised_kernel_has_one_name_in_every_group(self, name: str) -> None:
        for group in ("precision", "softmax", "tiling"):
            assert name in LIBRARY.options(group)

    @pytest.mark.parametrize("name", LIBRARY.options("attention"))
    def test_attention(self, name: str) -> None:
        kinds = {"tiled": Tiled, "naive": Naive, "exact": Exact, "custom": Custom, "triton": Triton, "sdpa": Sdpa, "flex": Flex}
        kinds |= {"instrumented": Instrumented, "vanilla": Vanilla}
        function = {"attention__function": "tests.cli.test_build:some_attention"} if name == "custom" else {}
        built = variant(attention=name, **function)
        assert type(built) is kinds[name]

    def test_settings_are_the_fields_of_the_objects(self) -> None:
        settings = config()
        of_exp = {"exp_coefficients", "exp_share"}
        assert set(settings["softmax"]) == {field.name for field in fields(OnlineSoftmax)} | of_exp
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
        built = build.problem(EXPANDER.request(changes, {"problem.scale": 2}).config["problem"])
        assert (built.mask, built.scale) == (Mask(True, 8, (5, 7)), 2.0)

    def test_a_file_belongs_to_captured(self) -> None:
        with pytest.raises(BadInput, match=r"problem\.source\.path: 'x\.pt' .*only problem=captured"):
            build.problem(config(problem__source__path="x.pt")["problem"])
        with pytest.raises(BadInput, match=r"problem\.source\.parameter: 3\.0"):
            build.problem(EXPANDER.request({"problem": "captured", "problem.source.parameter": 3}).config["problem"])


class TestPrecision:
    @pytest.mark.parametrize("step", [field.name for field in fields(Precision)])
    def test_every_step_can_be_overridden(self, step: str) -> None:
        text = "e4m3fn:toward_zero:saturate"
        built = build.precision(EXPANDER.request({"precision": "kernel_bf16", f"precision.{step}": text}).config["precision"])
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
            build.precision(EXPANDER.request({f"precision.{step}": "bf17"}).config["precision"])
        assert error.value.field == f"precision.{step}"

    def test_any_format_is_a_preset(self) -> None:
        assert build.precision(config(precision__preset="e8m10")["precision"]) == Precision.parse("e8m10")

    def test_quantised_fields(self) -> None:
        changes = {"scale": "row", "block": 32, "hadamard": False, "smoothing": "qk", "values": "bf16", "seed": 7, "to": "e5m2"}
        changes |= {"block_q": 16, "smoothing_block": 64, "values_scale": "channel"}
        layer = {f"precision.quantise.{name}": value for name, value in changes.items()}
        inputs = build.precision(EXPANDER.request({"precision": "fp8"} | layer).config["precision"]).inputs
        assert inputs == Quantised(Cast(E5M2), Scale.ROW, 32, 16, False, Smoothing.QK, 64, Cast(BF16), Scale.CHANNEL, 7)

    def test_one_quantised_field_leaves_the_others(self) -> None:
        built = build.precision(EXPANDER.request({"precision": "int8", "precision.quantise.values": "same"}).config["precision"])
        base = Precision.int8().inputs
        assert isinstance(base, Quantised)
        assert built.inputs == replace(base, values=None)

    def test_plain_inputs_become_quantised(self) -> None:
        layer = {"precision": "eager_fp16", "precision.inputs": "e4m3fn", "precision.quantise.scale": "tensor"}
        assert build.precision(EXPANDER.request(layer).config["precision"]).inputs == Quantised(Cast.parse("e4m3fn"))

    @pytest.mark.parametrize("name", MICROSCALED)
    def test_inputs_can_be_microscaled(self, name: str) -> None:
        fmt = Microscaled.parse(name)
        for layer in ({"precision.inputs": name}, {"precision.quantise.to": name}):
            inputs = build.precision(EXPANDER.request({"precision": "fp8"} | layer).config["precision"]).inputs
            assert isinstance(inputs, Quantised)
            assert (inputs.to, inputs.scale, inputs.hadamard) == (fmt, None, "precision.quantise.to" in layer)

    def test_values_can_have_another_grid(self) -> None:
        changes = {"to": "int4", "scale": "block", "values": "e4m3fn:saturate", "values_scale": "channel"}
        layer = {f"precision.quantise.{name}": value for name, value in changes.items()}
        inputs = build.precision(EXPANDER.request({"precision": "kernel_fp16"} | layer).config["precision"]).inputs
        low = Cast.parse("e4m3fn:saturate")
        assert inputs == Quantised(Cast.parse("int4"), Scale.BLOCK, values=low, values_scale=Scale.CHANNEL)

    def test_a_preset_s_smoothing_and_scale_of_v_can_be_taken_away(self) -> None:
        layer = {"precision": "sage2_int4", "precision.quantise.smoothing": "k", "precision.quantise.values_scale": "none"}
        inputs = build.precision(EXPANDER.request(layer).config["precision"]).inputs
        assert isinstance(inputs, Quantised)
        assert (inputs.smoothing, inputs.smoothing_block, inputs.values_scale) == (Smoothing.K, None, None)

    def test_probabilities_can_be_microscaled(self) -> None:
        built = build.precision(config(precision="kernel_bf16", precision__probabilities="mxfp4")["precision"])
        assert built.probabilities == MICROSCALED["mxfp4"]
        with pytest.raises(BadInput, match=r"^precision\.probabilities: 'nvfp4'"):
            build.precision(config(precision="kernel_bf16", precision__probabilities="nvfp4")["precision"])

    @pytest.mark.parametrize("step", ["scores", "exponential", "output"])
    def test_other_steps_cannot(self, step: str) -> None:
        with pytest.raises(BadInput, match=rf"^precision\.{step}: 'mxfp4'"):
            build.precision(EXPANDER.request({f"precision.{step}": "mxfp4"}).config["precision"])

    def test_a_cast_takes_the_quantisation_away(self) -> None:
        built = build.precision(EXPANDER.request({"precision": "fp8", "precision.inputs": "bf16"}).config["precision"])
        assert built.inputs == Cast(BF16)


class TestSoftmax:
    @pytest.mark.parametrize("name", EXPONENTIALS)
    def test_named_exponentials(self, name: str) -> None:
        assert build.softmax(config(softmax__exp=name)["softmax"]).exp == EXPONENTIALS[name]

    def test_a_polynomial_by_its_coefficients_and_share(self) -> None:
        layer = {"softmax.exp_coefficients": [1, 0.7], "softmax.exp_share": 0.25}
        expected = Exponential.polynomial((1.0, 0.7), 0.25)
        assert build.softmax(EXPANDER.request(layer).config["softmax"]).exp == expected
        assert build.softmax(EXPANDER.request(layer | {"softmax.exp": "exp2"}).config["softmax"]).exp == expected

    def test_a_named_polynomial_in_a_share(self) -> None:
        built = build.softmax(EXPANDER.request({"softmax": "fa4", "softmax.exp_share": 0.5}).config["softmax"])
        assert built.exp == Exponential.polynomial(FA4_COEFFICIENTS, 0.5)

    @pytest.mark.parametrize(
        ("layer", "field"),
        [
            ({"softmax.exp": "exp2_poly3", "softmax.exp_coefficients": [1.0, 0.7]}, "softmax.exp_coefficients"),
            ({"softmax.exp": "exp", "softmax.exp_coefficients": [1.0, 0.7]}, "softmax.exp_coefficients"),
            ({"softmax.exp_coefficients": []}, "softmax.exp_coefficients"),
            ({"softmax.exp": "exp2", "softmax.exp_share": 0.5}, "softmax.exp_share"),
            ({"softmax.exp": "exp2_poly3", "softmax.exp_share": 2.0}, "softmax.exp_share"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, layer: dict[str, Any], field: str) -> None:
        with pytest.raises(BadInput) as caught:
            build.softmax(EXPANDER.request(layer).config["softmax"])
        assert caught.value.field == field


class TestTiling:
    def test_fields(self) -> None:
        changes = {"br": 16, "bc": 32, "order": "strided", "splits": 2, "stride": 4, "seed": 9}
        layer = {f"tiling.{name}": value for name, value in changes.items()}
        built = build.tiling(EXPANDER.request(layer).config["tiling"], 64)
        assert built == Tiling(16, 32, Order.STRIDED, 2, 4, 9)

    @pytest.mark.parametrize(
        ("shape", "sides"),
        [("as_is", (64, 128)), ("swapped", (128, 64)), ("square", (91, 91)), ("square_bc", (128, 128))],
    )
    def test_sram_then_shape(self, shape: str, sides: tuple[int, int]) -> None:
        layer = {"tiling.sram": 128 * 4 * 64, "tiling.shape": shape, "tiling.order": "reverse"}
        built = build.tiling(EXPANDER.request(layer).config["tiling"], 64)
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
        assert built == Tiled(Precision.parse("kernel_fp16"), Tiling(bc=16), FLASH_1, count=False)

    def test_naive(self) -> None:
        built = variant(attention="naive", attention__normalise="end", precision="fp16")
        assert built == Naive(Precision.parse("fp16"), Normalise.END)

    def test_custom(self) -> None:
        built = variant(attention="custom", attention__function="tests.cli.test_build:some_attention", precision="fp32")
        assert built == Custom("tests.cli.test_build:some_attention", FP32)

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
        assert build.point(EXPANDER.request(layer)).baseline == expected

    def test_follows_the_output_format(self) -> None:
        point = build.point(EXPANDER.request({"precision": "kernel_bf16", "precision.output": "fp16", "baseline": "uniform"}))
        assert point.baseline == Naive(Precision.parse("fp16"))

    def test_unknown(self) -> None:
        with pytest.raises(BadInput, match=r"baseline\.precision: 'bf17' .*or uniform, none, null"):
            build.point(EXPANDER.request({"baseline.precision": "bf17"}))


def test_point_carries_seeds_setting_and_labels() -> None:
    point = build.point(request(seeds=3), "here", {"problem.n": 1024})
    assert (point.seeds, point.scenario, point.labels) == (3, "here", {"problem.n": 1024})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tiling.order", "sideways"),
        ("tiling.shape", "round"),
        ("softmax.normalise", "never"),
        ("softmax.exp", "exp3"),
        ("softmax.scale_on", "values"),
        ("softmax.sum_over", "rows"),
        ("precision.quantise.scale", "column"),
        ("precision.quantise.smoothing", "v"),
        ("precision.quantise.values_scale", "column"),
        ("baseline.normalise", "never"),
        ("problem.source.kind", "gauss"),
    ],
)
def test_every_choice_names_its_setting_and_what_there_is(path: str, value: str) -> None:
    layer = {path: value}
    with pytest.raises(BadInput, match=rf"^{path}: '{value}' cannot be used; (did you mean|use one of) ") as error:
        build.point(EXPANDER.request(layer))
    assert error.value.field == path


def test_building_changes_no_setting() -> None:
    asked = request(precision="fp8", precision__quantise__scale="row")
    before = deepcopy(asked)
    build.point(asked)
    assert asked == before
    assert nested({"a.b.c": 1, "a.d": 2}) == {"a": {"b": {"c": 1}, "d": 2}}
