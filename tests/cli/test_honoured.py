"""The law that nothing explicit is ignored: what is stated is honoured, or refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

from numdev.arithmetic.formats import E4M3FN, FP16, Format
from numdev.attention.precision import Precision
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.tiling import Tiling
from numdev.cli import build
from numdev.cli.compose import Flat, Request, Statement, composer, study_fields
from numdev.cli.expand import Expander
from numdev.errors import BadInput, NotHonoured
from numdev.results.record import describe
from numdev.results.study import Study
from numdev.sources import config_folder

KNOWN = composer((config_folder(),))
RUN = {"device", "results", "fresh", "shard", "shards", "workers", "study", "objective", "metrics", "dry_run"}
NAMES = [name for name in KNOWN.known() if name not in ("operation", "problem.source") and ".fmt." not in name]
ACCEPTED = {kind: build.accepted_by(KNOWN.values({"attention": kind}), "attention") for kind in KNOWN.options("attention")}
MAKERS = tuple(ACCEPTED)
FUNCTION = "numdev.attention.exact:rounded_once"
EMULATED = {"baseline": "emulation", "tiling.bc": 16, "tiling.order": "reverse", "attention.kernel": "portable"}

CAPTURED = {"problem": "captured"}

# Another value than the default's, and the settings beside which it is stated: where only some make it count, both with and
# without them.
CASES: dict[str, list[tuple[Any, Flat]]] = {
    "seeds": [(3, {})],
    "problem.n": [(96, {}), (96, {"problem.queries": 5})],
    "problem.batch": [(2, {})],
    "problem.heads": [(4, {})],
    "problem.kv_heads": [(2, {"problem.heads": 4})],
    "problem.queries": [(7, {})],
    "problem.keys": [(9, {})],
    "problem.head_dim": [(32, {})],
    "problem.causal": [(True, {})],
    "problem.window": [(5, {})],
    "problem.key_lengths": [([5], {})],
    "problem.scale": [(0.5, {})],
    "problem.softcap": [(2.0, {})],
    **{
        f"problem.source.{name}": [(value, {}), (value, {"problem": kind})]
        for kind, name, value in (
            ("normal_logits", "std", 3.0),
            ("outliers", "share", 0.25),
            ("student_t", "df", 5.0),
            ("tied", "copies", 3),
            ("sink", "rise", 2.0),
            ("gap", "gap", 2.0),
            ("constant", "value", 2.0),
        )
    },
    "problem.source.path": [("own.safetensors", {}), ("own.safetensors", CAPTURED)],
    "problem.source.layer": [("layer0", {}), ("layer0", CAPTURED)],
    "precision.preset": [("fp16", {}), ("golden", {}), ("kernel_fp16", {}), ("eager_fp16", {}), ("int8", {})],
    "precision.accumulator": [("e5m2", {}), ("e5m2", {"attention.normalise": "end"})],
    **{f"precision.{step}": [("e5m2", {})] for step in ("inputs", "scores", "exponential", "rescale", "row_sum")},
    **{f"precision.{step}": [("e5m2", {})] for step in ("probabilities", "values", "output")},
    "precision.quantise.to": [("e4m3fn", {})],
    "precision.quantise.scale": [("row", {})],
    "precision.quantise.block": [(32, {}), (32, {"precision.quantise.scale": "block"})],
    "precision.quantise.hadamard": [(True, {})],
    "precision.quantise.smoothing": [("k", {})],
    "precision.quantise.values": [("fp16", {})],
    "precision.quantise.queries": [("fp16", {})],
    "precision.quantise.block_q": [(32, {}), (32, {"precision.quantise.scale": "block"})],
    "precision.quantise.smoothing_block": [(32, {}), (32, {"precision.quantise.smoothing": "q"})],
    "precision.quantise.values_scale": [("channel", {}), ("channel", {"precision.quantise.values": "e4m3fn"})],
    "precision.quantise.seed": [(7, {}), (7, {"precision.quantise.hadamard": True})],
    "tiling.br": [(16, {}), (16, {"tiling.shape": "square"})],
    "tiling.bc": [(16, {}), (32, EMULATED)],
    "tiling.order": [("reverse", {}), ("forward", EMULATED)],
    "tiling.sram": [(4096, {})],
    "tiling.shape": [("swapped", {"tiling.br": 16, "tiling.bc": 32})],
    "tiling.stride": [(5, {}), (5, {"tiling.order": "strided"})],
    "tiling.seed": [(5, {}), (5, {"tiling.order": "random"})],
    "tiling.splits": [(2, {}), (2, EMULATED)],
    "tiling.split_size": [(128, {})],
    "softmax.exp": [("exp", {"softmax.exp": "exp2"}), ("exp2_poly3", {})],
    "softmax.rescale_threshold": [(8.0, {})],
    "softmax.p_scale": [(256.0, {})],
    "softmax.tie_shift": [(2.0, {})],
    "attention.count": [(False, {})],
    "attention.normalise": [("end", {})],
    "attention.function": [("tests.cli.test_build:some_attention", {})],
    "attention.backend": [("math", {})],
    "attention.version": [("fa2", {})],
    "attention.products": [("tf32", {}), ("tf32", {"precision.preset": "fp32"})],
    "attention.kernel": [("portable", {})],
    "attention.promotion": [(4, {}), (4, {"precision.preset": "e4m3fn", "attention.kernel": "hopper"})],
    "baseline.precision": [("kernel_fp16", {}), ("kernel_fp16", EMULATED)],
    "baseline.forward": [("own", {}), ("own", EMULATED)],  # of another operation, as the next two are
    "baseline.query_order": [("forward", {}), ("forward", EMULATED)],
    "baseline.numerics": [("fp32", {})],
    "baseline.exact": [(True, {})],
    "baseline.normalise": [("end", {}), ("end", {"baseline": "none"})],
}


def choices(group: str, kind: type) -> dict[str, list[tuple[Any, Flat]]]:
    """A case for each setting that is a choice: the last member that is not the default."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if isinstance(hint, type) and issubclass(hint, Enum)}
    others = {name: [one for one in hint if one is not getattr(kind(), name)][-1] for name, hint in hints.items()}
    return {f"{group}.{name}": [(other.value, {})] for name, other in others.items()}


CASES = choices("softmax", OnlineSoftmax) | choices("tiling", Tiling) | CASES


@pytest.fixture(autouse=True, scope="module")
def captured_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("captured")
    save_file({f"layer0.{name}": torch.ones(1, 4, 4) for name in "qkv"}, folder / "own.safetensors")
    with contextlib.chdir(folder):
        yield


def function(kind: str) -> dict[str, str]:
    return {"attention.function": FUNCTION} if kind == "custom" else {}


def asked_of(kind: str, *layers: Flat) -> Request:
    return KNOWN.request({"attention": kind} | function(kind), *layers)


def built(request: Request) -> Any:
    made = build.point(request)
    return describe(made.problem), describe(made.variant), describe(made.baseline), made.seeds


def outcome(request: Request) -> Any:
    """What is built, or the refusal: an emulation asks for what it does not know."""
    try:
        return built(request)
    except BadInput as error:
        return error


class TestTheLaw:
    def test_every_setting_has_a_case(self) -> None:
        assert set(NAMES) - RUN - set(CASES) == set()
        assert set(CASES) - set(NAMES) == set()

    @pytest.mark.parametrize("kind", MAKERS)
    def test_what_is_stated_changes_what_is_built_or_is_refused_by_name(self, kind: str) -> None:
        """Every variant and every setting; only the one is explicit, so that only it can be to blame."""
        for name, value, beside in ((name, value, beside) for name, cases in CASES.items() for value, beside in cases):
            asked = asked_of(kind, beside, {name: value})
            only = replace(asked, said={key: one for key, one in asked.said.items() if key == name})
            after = outcome(only)
            if isinstance(after, BadInput):
                assert after.field == name, beside
            else:
                assert after != outcome(replace(asked_of(kind, beside), said={})), (name, value, beside)

    @pytest.mark.parametrize("kind", MAKERS)
    def test_the_value_that_it_would_have_anyway_is_refused_too(self, kind: str) -> None:
        whole = asked_of(kind)
        always = build.accepted_by(whole.raw, "problem").names | build.accepted_by(whole.raw, "baseline").names | {"seeds"} | RUN
        others = set(NAMES) - ACCEPTED[kind].names - always
        assert others or kind in ("tiled", "instrumented")
        for name in sorted(name for name in others if whole.raw.get(name) is not None):
            with pytest.raises(NotHonoured, match=rf"^{name}: .*attention={kind} ") as refused:
                build.point(replace(whole, said={name: Statement(name, whole.raw[name])}))
            assert refused.value.field == name


class TestDeclarations:
    def test_every_setting_is_honoured_by_something(self) -> None:
        declared = set().union(*(each.names for each in ACCEPTED.values()))
        for group in ("problem", "baseline"):
            for option in KNOWN.options(group):
                declared |= build.accepted_by(KNOWN.values({group: option}), group).names
        assert set(NAMES) - declared == RUN | {"seeds"}

    def test_what_declares_nothing_honours_its_own_node_and_what_that_refers_to(self) -> None:
        raw = {"variant._target_": "fractions.Fraction", "variant.numerator": 3, "variant.of": "${steps}", "variant.n": "${m.n}"}
        others = {"steps.a": 1, "steps.b.c": "${.d}", "steps.b.d": 2, "m.n": 3, "m.o": 4}
        found = build.accepted_by(raw | others, "variant").names
        assert found == {"variant.numerator", "variant.of", "variant.n", "steps.a", "steps.b.c", "steps.b.d", "m.n"}

    @pytest.mark.parametrize("kind", MAKERS)
    def test_what_is_idle_is_honoured_otherwise(self, kind: str) -> None:
        variant = build.point(KNOWN.request({"attention": kind} | function(kind))).variant
        assert set(variant.idle) <= variant.accepted_settings.names


FIXED = [kind for kind in MAKERS if ACCEPTED[kind].family]


class TestFormatOfFixedArithmetic:
    @pytest.mark.parametrize("kind", FIXED)
    def test_precision_names_a_format_alone_or_the_variants_own_policy(self, kind: str) -> None:
        honours, own = ACCEPTED[kind], "eager" if kind == "vanilla" else "kernel"
        for preset in Precision.preset_names().values():
            family, _, name = preset.rpartition("_")
            if family in ("", own) and name in {fmt.name for fmt in honours.formats}:
                assert honours.format_of(preset, f"attention={kind}") == Format.parse(name)
            else:
                words = rf"^precision\.preset: '{preset}' .*attention={kind} has an arithmetic of its own"
                with pytest.raises(NotHonoured, match=words):
                    honours.format_of(preset, f"attention={kind}")

    def test_fp8_inputs_give_fp16(self) -> None:
        made = build.point(KNOWN.request({"attention": "triton", "precision": "e4m3fn"})).variant
        assert (made.fmt, made.format) == (E4M3FN, FP16)
        with pytest.raises(NotHonoured, match="attention=triton returns fp16; name a format alone"):
            build.point(KNOWN.request({"attention": "triton", "precision": "kernel_e4m3fn"}))


class TestWords:
    @pytest.mark.parametrize(
        ("layer", "words"),
        [
            ({"attention": "naive", "tiling.bc": 16}, r"tiling\.bc: 16 .*take attention=flex or instrumented or tiled or triton"),
            ({"attention.backend": "cudnn"}, r"attention\.backend: 'cudnn' .*attention=tiled .*, or take attention=sdpa"),
            ({"attention": "sdpa", "tiling.br": 1, "softmax": "fa1"}, r"softmax: 'fa1' .*softmax\.normalise.* nor tiling\.br"),
            ({"tiling.stride": 5}, r"tiling\.stride: 5 .*only with tiling\.order=strided"),
            ({"attention": "triton", "attention.products": "ieee"}, r"attention\.products: .*only with precision=fp32"),
            ({"attention": "naive", "precision.rescale": "bf16"}, r"precision\.rescale: 'bf16' .*attention=naive does not"),
            ({"baseline": "none", "baseline.normalise": "end"}, r"baseline\.normalise: 'end' .*baseline=none does not read"),
            ({"baseline": "emulation", "baseline.precision": "fp16"}, r"baseline\.precision: .*baseline=emulation does not"),
            ({"problem.n": 4, "problem.queries": 1, "problem.keys": 2}, r"problem\.n: 4 .*queries=1 and problem\.keys=2"),
            ({"precision.inputs": "bf16", "precision.quantise.to": "e5m2"}, r"precision\.inputs: .*quantise\.to=e5m2"),
            ({"tiling.br": 16, "tiling.shape": "square_bc"}, r"tiling\.br: 16 .*tiling\.shape=square_bc"),
        ],
    )
    def test_name_the_field_the_variant_and_the_mend(self, layer: dict[str, Any], words: str) -> None:
        with pytest.raises(NotHonoured, match=f"^{words}"):
            build.point(KNOWN.request(layer))

    def test_an_option_that_another_replaces_states_nothing(self) -> None:
        assert str(KNOWN.request({"baseline": "emulation"}, {"baseline": "eager"}).said["baseline"]) == "baseline=eager"


WITHOUT_EFFECT: list[tuple[Flat, str, str, Flat]] = [
    # what is stated, the setting that is refused, what else the sentence says, and what gives the same bits
    ({"softmax": "fa4", "tiling.bc": 32}, "softmax", "give tiling.bc of at least 45", {"softmax.exp": "exp2", "tiling.bc": 32}),
    ({"softmax.exp": "exp2_fa4", "tiling.bc": 16}, "softmax.exp", "tiling.bc", {"softmax.exp": "exp2", "tiling.bc": 16}),
    ({"softmax.exp": "exp2_poly3@0.01"}, "softmax.exp", "a larger share", {"softmax.exp": "exp2"}),
    ({"tiling.splits": 100}, "tiling.splits", "100 keys are 2 tiles of 64, .*; give at most 2", {"tiling.splits": 2}),
    ({"precision.row_sum": "bf16@1000"}, "precision.row_sum", "give bf16, or at most 64 behind @", {"precision.row_sum": "bf16"}),
    ({"precision.values": "bf16@65"}, "precision.values", "64 terms", {"precision.values": "bf16"}),
    ({"precision.scores": "bf16@33"}, "precision.scores", "a sum of 32 terms", {"precision.scores": "bf16"}),
]


class TestValuesWithoutEffect:
    SMALL: ClassVar[Flat] = {"problem.n": 100, "problem.head_dim": 32}

    @pytest.mark.parametrize("kind", ["tiled", "instrumented"])
    @pytest.mark.parametrize(("layer", "field", "words", "same"), WITHOUT_EFFECT, ids=[str(one[0]) for one in WITHOUT_EFFECT])
    def test_are_refused_by_name(self, kind: str, layer: Flat, field: str, words: str, same: Flat) -> None:
        with pytest.raises(NotHonoured, match=words) as refused:
            build.point(KNOWN.request({"attention": kind} | self.SMALL | layer))
        assert refused.value.field == field
        build.point(KNOWN.request({"attention": kind} | self.SMALL | same))

    def test_what_the_number_of_keys_decides_is_what_a_sweep_over_it_begins_with(self) -> None:
        for layer in ({"tiling.order": "reverse"}, {"softmax.rescale_threshold": 8.0}, {"precision.row_sum": "bf16@64"}):
            build.point(KNOWN.request({"problem.n": 16} | layer))
        made = study(axes={"problem.n": [64, 256]}, base={"tiling.splits": 4})
        assert ["at most 1" in point.refused for point in made.points] == [True, False]

    @pytest.mark.parametrize("precision", ["sage1", "sage2"])
    def test_a_preset_is_not_refused_for_its_own_steps(self, precision: str) -> None:
        build.point(KNOWN.request({"precision": precision, "tiling.bc": 8}))

    @pytest.mark.parametrize(
        "layer",
        [{"precision": "kernel_bf16", "precision.preset": "fp16"}, {"softmax": "fa2", "softmax.normalise": "each"}],
        ids=str,
    )
    def test_an_option_of_which_nothing_is_left_is_refused(self, layer: Flat) -> None:
        group = next(iter(layer))
        with pytest.raises(NotHonoured, match=rf"^{group}: .* replaces all that it states; leave one of them out"):
            KNOWN.request(layer)
        above = KNOWN.request({group: layer[group]}, {name: value for name, value in layer.items() if name != group})
        build.point(above)
        KNOWN.request({"softmax": "fa1", "softmax.normalise": "end"})


def study(task: dict[str, Any] | None = None, **parts: Any) -> Study:
    return Expander(KNOWN, task or {}).study("toy", study_fields("toy", {"title": "Toy"} | parts))


class TestStudies:
    def test_of_a_kernel_that_honours_none_of_its_scenarios_has_no_point_to_measure(self) -> None:
        made = Expander(KNOWN, {"attention": "sdpa"}).study("fig4", KNOWN.study("fig4"))
        assert all("attention=sdpa does not read" in point.refused for point in made.points)
        assert {type(point.variant).__name__ for point in made.points} == {"Refused"}
        assert len({point.variant for point in made.points}) > 1  # each is filed for itself, by what it states

    def test_marks_the_points_that_cannot_be_as_stated_and_no_others(self) -> None:
        kernel = {"ours": {"attention": "tiled"}, "theirs": {"attention": "sdpa"}}
        made = study(axes={"precision": ["bf16", "fp64", "int8"], "kernel": kernel, "tiling.bc": [None, 16]})
        refused = [tuple(point.labels.values()) for point in made.points if point.refused]
        assert refused == [("bf16", "theirs", 16), ("fp64", "theirs", 16), ("int8", "theirs", None), ("int8", "theirs", 16)]
