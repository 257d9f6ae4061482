"""Settings of the command line become the objects that Python makes; each value that cannot be used is named."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from numdev.arithmetic.formats import BF16, E5M2, FP32
from numdev.arithmetic.products import Dot
from numdev.arithmetic.quantise import MICROSCALED, Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.captured import Captured
from numdev.attention.emulation import baseline_for
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape, Tied
from numdev.attention.softmax import EXPONENTIALS, FA4_COEFFICIENTS, Exponential, Maximum, Normalise, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.vendor.custom import Custom
from numdev.cli import build
from numdev.cli.compose import composer
from numdev.errors import BadInput
from numdev.sources import config_folder
from tests.cli import commands

COMPOSER = composer((config_folder(),))
FUNCTION = "tests.cli.test_build:some_attention"
FLASH_1 = OnlineSoftmax(Normalise.EACH, maximum=Maximum.LOCAL)
E4M3 = Cast.parse("e4m3fn")
INT8, INT4 = Precision.int8().inputs, Precision.parse("sage2_int4").inputs
assert isinstance(INT8, Quantised)
assert isinstance(INT4, Quantised)


def some_attention(q: Any, k: Any, v: Any, mask: Mask, scale: float) -> Any:
    return v


def made(node: str, settings: dict[str, Any]) -> Any:
    """The object of a node, or with a dot an attribute of it."""
    node, _, attribute = node.partition(".")
    built = build.node(COMPOSER.request(settings).config, node)
    return attrgetter(attribute)(built) if attribute else built


def quantise(fields: str) -> str:
    return " ".join(f"precision.quantise.{field}" for field in fields.split())


def problem(source: Any, queries: int, head_dim: int = 64, **shape: int) -> Problem:
    return Problem(source, Shape(queries=queries, keys=shape.pop("keys", queries), head_dim=head_dim, **shape))


QUANTISED = "to=e5m2 scale=row block=32 block_q=16 hadamard=false smoothing=qk values=bf16 values_scale=channel seed=7"
GRID = "to=int4 scale=block values=e4m3fn:saturate values_scale=channel"
SIDES = {"as_is": (64, 128), "swapped": (128, 64), "square": (91, 91), "square_bc": (128, 128)}
MASK = "problem.causal=true problem.window=8 problem.key_lengths=[5,7] problem.batch=2"
MADE: list[tuple[str, str, Any]] = [
    # node and attribute, settings, what they make
    *(("precision", f"precision={name}", Precision.parse(name)) for name in ("golden", "sage3", "kernel_e4m3fn", "eager_fp16")),
    ("precision.output", "precision=kernel_bf16 precision.output=fp32", Cast(FP32)),
    ("precision.scores", "precision.scores=bf16@64", Dot(Cast(BF16), 64)),
    (
        "precision.inputs",
        f"precision=fp8 {quantise(QUANTISED)}",
        Quantised(Cast(E5M2), Scale.ROW, 32, 16, False, Smoothing.QK, None, Cast(BF16), Scale.CHANNEL, 7),
    ),
    ("precision.inputs", "precision=int8 precision.quantise.values=same", replace(INT8, values=None)),
    ("precision.inputs", "precision=eager_fp16 precision.inputs=e4m3fn precision.quantise.scale=tensor", Quantised(E4M3)),
    (
        "precision.inputs",
        f"precision=kernel_fp16 {quantise(GRID)}",
        Quantised(Cast.parse("int4"), Scale.BLOCK, values=Cast.parse("e4m3fn:saturate"), values_scale=Scale.CHANNEL),
    ),
    ("precision.inputs", "precision=fp8 precision.inputs=bf16", Cast(BF16)),
    (
        "precision.inputs",
        "precision=sage2_int4 precision.quantise.smoothing=k precision.quantise.values_scale=none",
        replace(INT4, smoothing=Smoothing.K, smoothing_block=None, values_scale=None),
    ),
    ("precision.probabilities", "precision=kernel_bf16 precision.probabilities=mxfp4", MICROSCALED["mxfp4"]),
    *(("precision.inputs.to", f"precision=fp8 precision.quantise.to={name}", MICROSCALED[name]) for name in MICROSCALED),
    *(("problem", f"problem={kind.value}", problem(Distribution(kind), 1024)) for kind in Kind),
    ("problem", "problem=captured", problem(Captured("minilm"), 256, 32)),
    ("problem", "problem=tied problem.source.copies=3", problem(Tied(copies=3), 1024)),
    ("problem", "problem.n=96 problem.keys=128", problem(Distribution(), 96, keys=128)),
    ("problem", "problem.heads=4 problem.kv_heads=2", problem(Distribution(), 1024, heads=4, kv_heads=2)),
    ("problem.mask", MASK, Mask(True, 8, (5, 7))),
    ("problem.scale", "problem.scale=2", 2.0),
    ("softmax", "softmax=fa1", FLASH_1),
    ("softmax", "softmax=fa2", OnlineSoftmax()),
    ("softmax", "softmax=fa4", OnlineSoftmax(exp=Exponential.parse("exp2_fa4"), rescale_threshold=8.0)),
    *(("softmax.exp", f"softmax.exp={name}", EXPONENTIALS[name]) for name in EXPONENTIALS),
    ("softmax.exp", "softmax=fa4 softmax.exp=exp2_fa4@0.5", Exponential.polynomial(FA4_COEFFICIENTS, 0.5)),
    ("tiling", "", Tiling()),
    ("tiling", "tiling=fa3", Tiling(128, 176, Order.REVERSE)),
    ("tiling", "tiling.br=16 tiling.bc=32 tiling.order=strided tiling.stride=4", Tiling(16, 32, Order.STRIDED, stride=4)),
    *(("tiling", f"tiling.sram=32768 tiling.shape={shape}", Tiling(*sides)) for shape, sides in SIDES.items()),
    ("tiling.bc", "problem.head_dim=32 tiling.sram=4096", 32),
    ("variant", "tiling.bc=16 softmax=fa1 attention.count=false", Tiled(Precision.uniform(BF16), Tiling(bc=16), FLASH_1, False)),
    ("variant", "attention=naive attention.normalise=end precision=fp16", Naive(Precision.parse("fp16"), Normalise.END)),
    ("variant", f"attention=custom attention.function={FUNCTION} precision=fp32", Custom(FUNCTION, FP32)),
]


@pytest.mark.parametrize(("node", "settings", "expected"), MADE, ids=[f"{node} {settings}" for node, settings, _ in MADE])
def test_settings_make_what_python_makes(node: str, settings: str, expected: Any) -> None:
    assert made(node, commands.settings(settings)) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision.probabilities": "nvfp4"}, r"precision\.probabilities: 'nvfp4'"),
        *(({f"precision.{step}": "mxfp4"}, rf"precision\.{step}: 'mxfp4'") for step in ("scores", "exponential", "output")),
        *(({"softmax.exp": text}, r"softmax\.exp: ") for text in ("exp2@0.5", "exp2_poly3@2", "exp2_poly3@x", "exp2_poly3@")),
        ({"tiling.sram": 4096, "tiling.bc": 16}, r"tiling\.bc: 16 .*tiling\.sram=4096 gives the sides"),
        ({"attention": "tritom"}, r"attention: 'tritom' .*did you mean triton"),
        ({"problem.source.path": "x.pt"}, r"problem\.source\.path: 'x\.pt' .*problem=uniform .*take problem=captured"),
        ({"baseline.precision": "bf17"}, r"baseline\.precision: 'bf17' .*or uniform, null; for none, baseline=none"),
        *(
            ({path: value}, rf"{path}: '{value}' cannot be used; (did you mean|use one of) ")
            for path, value in {
                "tiling.order": "sideways",
                "softmax.normalise": "never",
                "softmax.exp": "exp3",
                "precision.quantise.scale": "column",
                "baseline.normalise": "never",
            }.items()
        ),
    ],
)
def test_what_cannot_be_used_names_its_setting_and_what_there_is(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=f"^{words}"):
        build.point(COMPOSER.request(settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, baseline_for(BF16)),
        ({"baseline": "uniform"}, Naive(Precision.uniform(BF16))),
        ({"baseline": "none"}, None),
        ({"baseline.precision": "kernel_fp32"}, Naive(Precision.parse("kernel_fp32"))),
        ({"baseline.normalise": "end"}, Naive(baseline_for(BF16).precision, Normalise.END)),
        ({"precision": "kernel_bf16", "precision.output": "fp16", "baseline": "uniform"}, Naive(Precision.parse("fp16"))),
    ],
)
def test_the_baseline_follows_the_variant(settings: dict[str, str], expected: Naive | None) -> None:
    assert build.point(COMPOSER.request(settings)).baseline == expected


def test_a_point_carries_seeds_scenario_and_labels_and_changes_no_setting() -> None:
    request = COMPOSER.request({"seeds": 3, "precision": "fp8", "precision.quantise.scale": "row"})
    before = deepcopy(request)
    point = build.point(request, "here", {"problem.n": 1024})
    assert (point.seeds, point.scenario, point.labels) == (3, "here", {"problem.n": 1024})
    assert request == before
