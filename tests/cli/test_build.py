from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, E5M2, FP32
from numdev.arithmetic.microscale import MICROSCALED, Microscaled
from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution, Kind, Tied
from numdev.attention.emulation import baseline_for
from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.softmax import EXPONENTIALS, FA4_COEFFICIENTS, Exponential, Maximum, Normalise, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.cli import build
from numdev.cli.compose import Library, Request, config_folder, make_importable, written
from numdev.cli.expand import Expander
from numdev.cli.schema import nested
from numdev.errors import BadInput, NotHonoured
from numdev.settings import declared

LIBRARY = Library((config_folder(),))
EXPANDER = Expander(LIBRARY)


def config(**choices_and_values: Any) -> Mapping[str, Any]:
    """The default configuration with changes; `tiling__bc=16` is `tiling.bc=16`."""
    return request(**choices_and_values).config


def request(**choices_and_values: Any) -> Request:
    return EXPANDER.request({key.replace("__", "."): value for key, value in choices_and_values.items()})


def made(node: str, asked: Request) -> Any:
    return build.node(asked.config, node)


def variant(**changes: Any) -> Any:
    return made("variant", request(**changes))


FLASH_1 = OnlineSoftmax(Normalise.EACH, maximum=Maximum.LOCAL)


class TestLeavesAgreeWithPython:
    @pytest.mark.parametrize("name", ["golden", "sage3", "kernel_e4m3fn", "eager_fp16"])
    def test_precision(self, name: str) -> None:
        assert made("precision", request(precision=name)) == Precision.parse(name)

    @pytest.mark.parametrize("kind", list(Kind))
    def test_problem(self, kind: Kind) -> None:
        built = made("problem", request(problem=kind.value))
        assert built == Problem(Distribution(kind), Shape(queries=1024, keys=1024, head_dim=64))

    def test_captured(self) -> None:
        built = made("problem", request(problem="captured"))
        assert built == Problem(Captured("minilm"), Shape(queries=256, keys=256, head_dim=32))

    def test_softmax(self) -> None:
        fa4 = OnlineSoftmax(exp=Exponential.parse("exp2_fa4"), rescale_threshold=8.0)
        assert [made("softmax", request(softmax=name)) for name in ("fa1", "fa2", "fa4")] == [FLASH_1, OnlineSoftmax(), fa4]

    def test_tiling(self) -> None:
        assert made("tiling", request()) == Tiling()
        assert made("tiling", request(tiling="fa3")) == Tiling(128, 176, Order.REVERSE)

    @pytest.mark.parametrize("name", LIBRARY.options("attention"))
    def test_attention(self, name: str) -> None:
        kinds = {"tiled": Tiled, "naive": Naive, "exact": Exact, "custom": Custom, "triton": Triton, "sdpa": Sdpa, "flex": Flex}
        kinds |= {"instrumented": Instrumented, "vanilla": Vanilla}
        function = {"attention__function": "tests.cli.test_build:some_attention"} if name == "custom" else {}
        built = variant(attention=name, **function)
        assert type(built) is kinds[name]

    @pytest.mark.parametrize("group", ["problem", "attention", "baseline"])
    def test_what_an_option_has_of_its_own_is_declared_with_its_default(self, group: str) -> None:
        for option in LIBRARY.options(group):
            leaf = LIBRARY.leaf(group, option)
            node = leaf["source"] if group == "problem" else leaf
            kind = build.made_by(node["_target_"])
            assert kind is not None
            said = {one.name: one for one in declared(kind)}
            own = {name: value for name, value in node.items() if not name.startswith("_") and not written(value).count("$")}
            own.pop("fmt", None)
            assert set(own) <= set(said), option
            for name, value in own.items():
                default = said[name].default
                assert value in (getattr(default, "value", default), "uniform") or (name, value) == ("function", None)


def some_attention(q: Any, k: Any, v: Any, mask: Mask, scale: float) -> Any:
    return v


class TestProblem:
    def test_n_is_queries_and_keys(self) -> None:
        shape = made("problem", request(problem__n=96, problem__keys=128)).shape
        assert (shape.queries, shape.keys) == (96, 128)

    def test_kv_heads_are_heads_unless_given(self) -> None:
        assert made("problem", request(problem__heads=4)).shape.kv_heads == 4
        assert made("problem", request(problem__heads=4, problem__kv_heads=2)).shape.kv_heads == 2

    def test_mask_and_scale(self) -> None:
        changes = {"problem.causal": True, "problem.window": 8, "problem.key_lengths": [5, 7], "problem.batch": 2}
        built = made("problem", EXPANDER.request(changes, {"problem.scale": 2}))
        assert (built.mask, built.scale) == (Mask(True, 8, (5, 7)), 2.0)

    def test_a_parameter_belongs_to_its_source(self) -> None:
        with pytest.raises(NotHonoured, match=r"problem\.source\.path: 'x\.pt' .*problem=uniform .*take problem=captured"):
            build.point(request(problem__source__path="x.pt"))
        with pytest.raises(NotHonoured, match=r"problem\.source\.std: 3 .*take problem=normal_logits"):
            build.point(EXPANDER.request({"problem": "captured", "problem.source.std": 3}))
        assert made("problem", request(problem="tied", problem__source__copies=7)).source == Tied(7)


class TestPrecision:
    @pytest.mark.parametrize("step", [field.name for field in fields(Precision)])
    def test_every_step_can_be_overridden(self, step: str) -> None:
        text = "e4m3fn:toward_zero:saturate"
        built = made("precision", EXPANDER.request({"precision": "kernel_bf16", f"precision.{step}": text}))
        base = Precision.parse("kernel_bf16")
        changed = {field.name for field in fields(Precision) if getattr(built, field.name) != getattr(base, field.name)}
        assert changed == {step}
        assert built.steps()[step] == text

    def test_products_take_a_number_of_products(self) -> None:
        built = made("precision", request(precision__values="fp32@16"))
        assert built.values == Dot(Cast(FP32), 16)

    @pytest.mark.parametrize("step", [field.name for field in fields(Precision)])
    def test_a_bad_cast_names_the_step(self, step: str) -> None:
        with pytest.raises(BadInput, match=rf"^precision\.{step}: 'bf17' cannot be used; use one of fp64") as error:
            made("precision", EXPANDER.request({f"precision.{step}": "bf17"}))
        assert error.value.field == f"precision.{step}"

    def test_quantised_fields(self) -> None:
        changes = {"scale": "row", "block": 32, "hadamard": False, "smoothing": "qk", "values": "bf16", "seed": 7, "to": "e5m2"}
        changes |= {"block_q": 16, "smoothing_block": 64, "values_scale": "channel"}
        layer = {f"precision.quantise.{name}": value for name, value in changes.items()}
        inputs = made("precision", EXPANDER.request({"precision": "fp8"} | layer)).inputs
        assert inputs == Quantised(Cast(E5M2), Scale.ROW, 32, 16, False, Smoothing.QK, 64, Cast(BF16), Scale.CHANNEL, 7)

    def test_one_quantised_field_leaves_the_others(self) -> None:
        built = made("precision", EXPANDER.request({"precision": "int8", "precision.quantise.values": "same"}))
        base = Precision.int8().inputs
        assert isinstance(base, Quantised)
        assert built.inputs == replace(base, values=None)

    def test_plain_inputs_become_quantised(self) -> None:
        layer = {"precision": "eager_fp16", "precision.inputs": "e4m3fn", "precision.quantise.scale": "tensor"}
        assert made("precision", EXPANDER.request(layer)).inputs == Quantised(Cast.parse("e4m3fn"))

    @pytest.mark.parametrize("name", MICROSCALED)
    def test_inputs_can_be_microscaled(self, name: str) -> None:
        fmt = Microscaled.parse(name)
        for layer in ({"precision.inputs": name}, {"precision.quantise.to": name}):
            inputs = made("precision", EXPANDER.request({"precision": "fp8"} | layer)).inputs
            assert isinstance(inputs, Quantised)
            assert (inputs.to, inputs.scale, inputs.hadamard) == (fmt, None, "precision.quantise.to" in layer)

    def test_values_can_have_another_grid(self) -> None:
        changes = {"to": "int4", "scale": "block", "values": "e4m3fn:saturate", "values_scale": "channel"}
        layer = {f"precision.quantise.{name}": value for name, value in changes.items()}
        inputs = made("precision", EXPANDER.request({"precision": "kernel_fp16"} | layer)).inputs
        low = Cast.parse("e4m3fn:saturate")
        assert inputs == Quantised(Cast.parse("int4"), Scale.BLOCK, values=low, values_scale=Scale.CHANNEL)

    def test_a_preset_s_smoothing_and_scale_of_v_can_be_taken_away(self) -> None:
        layer = {"precision": "sage2_int4", "precision.quantise.smoothing": "k", "precision.quantise.values_scale": "none"}
        inputs = made("precision", EXPANDER.request(layer)).inputs
        assert isinstance(inputs, Quantised)
        assert (inputs.smoothing, inputs.smoothing_block, inputs.values_scale) == (Smoothing.K, None, None)

    def test_probabilities_can_be_microscaled(self) -> None:
        built = made("precision", request(precision="kernel_bf16", precision__probabilities="mxfp4"))
        assert built.probabilities == MICROSCALED["mxfp4"]
        with pytest.raises(BadInput, match=r"^precision\.probabilities: 'nvfp4'"):
            made("precision", request(precision="kernel_bf16", precision__probabilities="nvfp4"))

    @pytest.mark.parametrize("step", ["scores", "exponential", "output"])
    def test_other_steps_cannot(self, step: str) -> None:
        with pytest.raises(BadInput, match=rf"^precision\.{step}: 'mxfp4'"):
            made("precision", EXPANDER.request({f"precision.{step}": "mxfp4"}))

    def test_a_cast_takes_the_quantisation_away(self) -> None:
        built = made("precision", EXPANDER.request({"precision": "fp8", "precision.inputs": "bf16"}))
        assert built.inputs == Cast(BF16)


class TestSoftmax:
    @pytest.mark.parametrize("name", EXPONENTIALS)
    def test_named_exponentials(self, name: str) -> None:
        assert made("softmax", request(softmax__exp=name)).exp == EXPONENTIALS[name]

    def test_a_polynomial_by_its_coefficients_and_share(self) -> None:
        layer = {"softmax.exp_coefficients": [1, 0.7], "softmax.exp_share": 0.25}
        expected = Exponential.polynomial((1.0, 0.7), 0.25)
        assert made("softmax", EXPANDER.request(layer)).exp == expected
        assert made("softmax", EXPANDER.request(layer | {"softmax.exp": "exp2"})).exp == expected

    def test_a_named_polynomial_in_a_share(self) -> None:
        built = made("softmax", EXPANDER.request({"softmax": "fa4", "softmax.exp_share": 0.5}))
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
            made("softmax", EXPANDER.request(layer))
        assert caught.value.field == field


class TestTiling:
    def test_fields(self) -> None:
        changes = {"br": 16, "bc": 32, "order": "strided", "splits": 2, "stride": 4, "seed": 9}
        layer = {f"tiling.{name}": value for name, value in changes.items()}
        built = made("tiling", EXPANDER.request(layer))
        assert built == Tiling(16, 32, Order.STRIDED, 2, 4, 9)

    @pytest.mark.parametrize(
        ("shape", "sides"),
        [("as_is", (64, 128)), ("swapped", (128, 64)), ("square", (91, 91)), ("square_bc", (128, 128))],
    )
    def test_sram_then_shape(self, shape: str, sides: tuple[int, int]) -> None:
        layer = {"tiling.sram": 128 * 4 * 64, "tiling.shape": shape, "tiling.order": "reverse"}
        built = made("tiling", EXPANDER.request(layer))
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
        make_importable([])
        asked = request(attention="custom", attention__function="attention_of_mine:all_of_v")
        assert build.point(asked).variant.format == BF16

    def test_unknown(self) -> None:
        with pytest.raises(BadInput, match=r"attention: 'tritom' .*did you mean triton"):
            variant(attention="tritom")


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
        with pytest.raises(BadInput, match=r"baseline\.precision: 'bf17' .*or uniform, null; for none, baseline=none"):
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
