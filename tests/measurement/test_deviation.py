"""One measurement: what is computed once, what is compared, and how everything that goes wrong ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev import Attention, BadInput, Bench, Captured, Cast, Deviation, Exact, Mask, Naive, Output, Tiling, Unsupported
from numdev.arithmetic.formats import BF16, FP16, FP32
from numdev.attention.operation import ATTENTION, ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.measurement import deviation as module
from numdev.measurement.deviation import Head, Place, Subject, head_of
from numdev.results.record import Record, Reference, Status

NORMAL = Problem(Distribution(Kind.NORMAL), Shape(heads=2, kv_heads=1, queries=12, keys=20, head_dim=8))
UNIFORM = Problem(Distribution(), Shape(queries=10, keys=10, head_dim=4), Mask(causal=True))
KERNEL = Tiled(Precision.kernel(BF16), Tiling(br=8, bc=8))
BASELINE = Naive(Precision.eager(BF16))


@dataclass(frozen=True)
class Counted(Attention):
    """Another implementation, and the seeds of its calls, told by the first element of q."""

    of: Attention
    calls: list[float] = field(default_factory=list, compare=False)

    @property
    def precision(self) -> Precision:
        return self.of.precision

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        self.calls.append(float(q.flatten()[0]))
        return self.of(q, k, v, mask, scale)


ERRORS: dict[str, BaseException] = {
    "unsupported": Unsupported("problem.window", "no window here"),
    "memory": MemoryError(),
    "gpu memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
    "cpu memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    "error": ZeroDivisionError("first line\nsecond line"),
    "silent": KeyError(),
    "exit": SystemExit(7),
    "bad": BadInput("attention.function", "f", "mend it"),
}


@dataclass(frozen=True)
class Wrong(Attention):
    """Exact attention on inputs in BF16, with something wrong."""

    what: str = "nothing"
    precision = Precision.golden().with_step(inputs="bf16")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        if self.what in ERRORS:
            raise ERRORS[self.what]
        output = Exact()(q, k, v, mask, scale)
        if self.what == "largest":
            output.out[..., 0, 0] += 100.0
        if self.what == "zeros":
            output.out.zero_()
        if self.what == "nan":
            output.out[..., 0, :2] = torch.nan
            output.out[..., 1, 0] = torch.inf
        return output


@pytest.fixture
def bench() -> Bench:
    return Bench(Exact(), "cpu")


def only(record: Record, **expected: object) -> list[dict[str, Any]]:
    return [row for row in record.rows if all(row[name] == value for name, value in expected.items())]


def test_rows_are_the_deviations_of_what_was_computed(bench: Bench) -> None:
    record = bench.measure(NORMAL, KERNEL, BASELINE, seeds=2)
    drawn = NORMAL.inputs(1)
    q, k, v = drawn["q"], drawn["k"], drawn["v"]
    rounded, arguments = KERNEL.round_inputs(q, k, v), (NORMAL.mask, NORMAL.softmax_scale)
    variant, baseline = KERNEL(*rounded, *arguments), BASELINE(*BASELINE.round_inputs(q, k, v), *arguments)
    golden, same = Exact()(q, k, v, *arguments), Exact()(*rounded, *arguments)
    compared = {
        ("variant", "golden"): (variant, golden),
        ("variant", "golden_same_inputs"): (variant, same),
        ("variant", "baseline"): (variant, baseline),
        ("baseline", "golden"): (baseline, golden),
        ("baseline", "golden_same_inputs"): (baseline, same),
    }
    assert len(record.rows) == 2 * 2 * len(compared)
    for (subject, reference), (x, r) in compared.items():
        for name, tensor in x.tensors().items():
            (result,) = only(record, seed=1, subject=subject, reference=reference, output=name)
            expected = Deviation.between(tensor.double(), r.tensors()[name].double(), BF16 if name == "out" else FP32)
            head = {"seed": 1, "cluster": "", "subject": subject, "output": name, "primary": name == "out"}
            head |= {"reference": reference}
            assert result == head | expected.metrics() | {"max_index": list(expected.max_index)}
    first, second = record.table("counters")
    assert (first["seed"], second) == (0, {"seed": 1} | variant.counters)
    assert record.seconds > 0


def test_golden_and_baseline_are_computed_once_per_problem_and_seed_and_variants_each_time() -> None:
    """Golden once more per kind of rounded inputs, which three variants and the baseline share here."""
    golden, baseline, variant = Counted(Exact()), Counted(BASELINE), Counted(KERNEL)
    bench = Bench(golden, "cpu")

    def calls(problem: Problem, variant: Any, seeds: int) -> tuple[int, int]:
        bench.measure(problem, variant, baseline, seeds=seeds)
        return len(golden.calls), len(baseline.calls)

    variants: list[Any] = [variant, Tiled(Precision.uniform(BF16)), Naive(Precision.uniform(BF16)), variant]
    assert [calls(NORMAL, each, 2) for each in variants] == [(4, 2)] * 4
    assert calls(NORMAL, Naive(Precision.uniform(FP16)), 2) == (6, 2), "other inputs"
    assert calls(NORMAL, KERNEL, 3) == (8, 3), "another seed"
    assert calls(UNIFORM, KERNEL, 1) == (10, 4), "another problem"
    assert len(variant.calls) == 4
    assert variant.calls[:2] == variant.calls[2:]


def test_rows_do_not_depend_on_seeds_order_or_what_is_kept(bench: Bench) -> None:
    """Of a seed: with two seeds or five, in a fresh bench or after others, with a cache or, as good as, without one."""
    two, five = bench.measure(NORMAL, KERNEL, BASELINE, seeds=2), bench.measure(NORMAL, KERNEL, BASELINE, seeds=5)
    assert two.rows == [row for row in five.rows if row["seed"] < 2]
    assert two.key != five.key
    other = Bench(Exact(), "cpu", cache_bytes=1)
    other.measure(UNIFORM, Tiled(Precision.uniform(FP16)), BASELINE, seeds=1)
    other.measure(NORMAL, Wrong("nan"), BASELINE, seeds=1)
    again = other.measure(NORMAL, KERNEL, BASELINE, seeds=5)
    assert (again.key, again.tables) == (five.key, five.tables)
    alone = Bench(Exact(), "cpu").measure(NORMAL, KERNEL, None, seeds=2)
    assert alone.rows == [row for row in two.rows if row["subject"] == "variant" and row["reference"] != "baseline"]


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("unsupported", Status.UNSUPPORTED, "problem.window: no window here"),
        ("memory", Status.OUT_OF_MEMORY, "MemoryError: ; use fewer queries"),
        ("gpu memory", Status.OUT_OF_MEMORY, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; use fewer queries"),
        ("cpu memory", Status.OUT_OF_MEMORY, "RuntimeError: DefaultCPUAllocator: can't allocate memory"),
        ("error", Status.ERROR, "ZeroDivisionError: first line (in __call__ of test_deviation.py, line "),
        ("silent", Status.ERROR, "KeyError:  (in __call__ of test_deviation.py, line "),
        ("exit", Status.ERROR, "SystemExit: it called sys.exit(7) (in __call__ of test_deviation.py, line "),
    ],
)
def test_what_goes_wrong_is_a_status_of_its_own_point(what: str, status: Status, reason: str, bench: Bench) -> None:
    before = bench.measure(NORMAL, KERNEL, BASELINE, seeds=2)
    record = bench.measure(NORMAL, Wrong(what), BASELINE, seeds=2)
    assert record.status is status
    assert record.reason.startswith(reason)
    assert "\n" not in record.reason
    assert record.tables == {"deviation": [], "counters": []}
    assert record.key == bench.key(NORMAL, Wrong(what), BASELINE, 2)
    after = bench.measure(NORMAL, KERNEL, BASELINE, seeds=2)
    assert (after.status, after.rows) == (Status.OK, before.rows)
    assert Record.from_json(record.to_json()) == record


def test_total_error_is_not_arithmetic_error(bench: Bench) -> None:
    """Exact arithmetic on rounded inputs: all of its error is that of the inputs; masked rows have none, their LSE being -inf."""
    record = bench.measure(NORMAL, Wrong(), seeds=2)
    assert all(row["max_difference"] == 0.0 for row in only(record, reference="golden_same_inputs"))
    assert all(row["max_difference"] > 0.0 for row in only(record, reference="golden"))
    masked = bench.measure(replace(NORMAL, mask=Mask(key_lengths=(0,))), KERNEL, BASELINE, seeds=1)
    assert (masked.status, {row["max_difference"] for row in masked.rows}) == (Status.OK, {0.0})


def test_nan_and_inf_are_counted(bench: Bench) -> None:
    """Per head 2 NaN and 1 Inf; two heads, two seeds. Measured, so the rows stand, of the finite values."""
    record = bench.measure(NORMAL, Wrong("nan"), BASELINE, seeds=2)
    assert record.status is Status.NONFINITE
    assert record.reason == "12 elements of the variant's out are not finite where golden is (8 NaN, 4 Inf)"
    for row in record.rows:
        broken = row["subject"] == "variant" and row["output"] == "out"
        assert (row["nan_count"], row["inf_count"]) == ((4, 2) if broken else (0, 0))
        assert row["compared"] == (NORMAL.inputs(0)["q"].numel() - 6 if row["output"] == "out" else 24)
    other = bench.measure(NORMAL, Wrong(), Wrong("nan"), seeds=1)
    assert other.status is Status.NONFINITE
    assert other.reason == "6 elements of the baseline's out are not finite where golden is (4 NaN, 2 Inf)"
    (against,) = only(other, subject="variant", reference="baseline", output="out")
    assert (against["reference_nan_count"], against["reference_inf_count"], against["nan_count"]) == (4, 2, 0)


def test_zeros_are_told(bench: Bench) -> None:
    """Golden's are not; where they are, as in rows that see no key, zeros are right."""
    record = bench.measure(NORMAL, Wrong("zeros"), BASELINE, seeds=2)
    assert record.status is Status.ZERO
    assert record.reason == "every element of the variant's out is 0 and golden's are not (2 of 2 replicates)"
    blind = replace(NORMAL, mask=Mask(key_lengths=(0,)))
    assert bench.measure(blind, Wrong("zeros"), BASELINE, seeds=2).status is Status.OK
    assert bench.measure(NORMAL, KERNEL, Wrong("zeros"), seeds=2).status is Status.OK, "the baseline's is no fault of the variant"


@pytest.mark.parametrize("broken", ["variant", "baseline"])
def test_variant_and_baseline_are_compared_over_the_same_elements(bench: Bench, broken: str) -> None:
    """The element that deviates most stands where the other has none: it is in the figures of neither."""
    largest, nan = Wrong("largest"), Wrong("nan")
    record = bench.measure(NORMAL, *((nan, largest) if broken == "variant" else (largest, nan)), seeds=2)
    rows = [row for row in record.rows if row["output"] == "out"]
    assert {row["compared"] for row in rows} == {NORMAL.inputs(0)["q"].numel() - 6}
    assert all(row["max_difference"] < 1.0 for row in rows)
    alone = bench.measure(NORMAL, largest, seeds=2)
    assert all(row["max_difference"] > 99 for row in only(alone, output="out")), "and in its own, where nothing is beside it"


def test_random_roundings_differ_between_replicates() -> None:
    """Equal inputs in every replicate: what differs is the rounding, and an interval over replicates shows it."""
    policy = Precision.parse("kernel_fp32").with_step(accumulator=Cast.parse("bf16:stochastic"))
    problem = Problem(Distribution(Kind.CONSTANT), Shape(queries=4, keys=300, head_dim=2))
    for variant in (Tiled(policy, Tiling(4, 3)), Tiled(Precision.parse("kernel_bf16"), Tiling(4, 3))):
        record = Bench(Exact(), "cpu").measure(problem, variant, None, 3)
        rmse = {row["rmse"] for row in record.rows if (row["output"], row["reference"]) == ("out", "golden")}
        assert (len(rmse - {0.0}) >= 3) == variant.precision.is_random


def test_own_sources_are_in_the_configuration(bench: Bench) -> None:
    """Of classes that are not numdev's: an edit of the file of such a class is another key."""
    assert "sources" not in bench.config(NORMAL, KERNEL, BASELINE, 1)
    assert len({bench.config(NORMAL, Wrong(), None, 1)["sources"], bench.config(NORMAL, KERNEL, Wrong(), 1)["sources"]}) == 1


def test_bad_requests_are_raised(bench: Bench) -> None:
    captured = Problem(Captured(layer="layer0"), Shape(heads=6, kv_heads=6, queries=8, keys=8, head_dim=32))
    assert {row["seed"] for row in bench.measure(captured, KERNEL, seeds=2).rows} == {0, 1}
    for problem, variant, seeds, name in (
        (NORMAL, Wrong("bad"), 1, "attention.function"),
        (NORMAL, KERNEL, 0, "seeds"),
        (captured, KERNEL, 3, "seeds"),
    ):
        with pytest.raises(BadInput, match=f"^{name}: "):
            bench.measure(problem, variant, seeds=seeds)
    with pytest.raises(BadInput, match="^device: "):
        Bench(Exact(), "tpu")


def test_a_problem_larger_than_memory_is_refused_before_it_starts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Counted(KERNEL)
    monkeypatch.setattr(module, "available_bytes", lambda _: NORMAL.bytes - 1)
    with pytest.raises(BadInput, match="^problem: .*use fewer queries, keys, heads or batch entries"):
        bench.measure(NORMAL, variant, seeds=1)
    assert variant.calls == []
    monkeypatch.setattr(module, "available_bytes", lambda _: NORMAL.bytes)
    assert bench.measure(NORMAL, variant, seeds=1).status is Status.OK


def test_keys(bench: Bench) -> None:
    points: Any = itertools.product((NORMAL, UNIFORM), (KERNEL, Exact()), (None, BASELINE), (1, 2))
    keys = [bench.key(*point) for point in points]
    assert len(set(keys)) == len(keys)
    record, how = bench.measure(NORMAL, KERNEL, BASELINE, seeds=2), (NORMAL, KERNEL, BASELINE, 2)
    assert (record.key, record.config) == (Bench(Exact(), "cpu").key(*how), bench.config(*how))
    assert record.environment == bench.environment()


PLACED = Problem(Distribution(), Shape(batch=2, heads=4, kv_heads=2, queries=12, keys=16, head_dim=8))


def head(variant: Any = KERNEL, baseline: Any = BASELINE, problem: Problem = PLACED, **place: Any) -> Head:
    operation = ATTENTION_BACKWARD if isinstance(variant, TiledBackward) else ATTENTION
    return head_of(operation, problem, variant, Place(**place), torch.device("cpu"), baseline)


@pytest.mark.parametrize("subject", Subject)
@pytest.mark.parametrize("reference", Reference)
def test_heads_together_have_the_figures_of_the_record(bench: Bench, subject: Subject, reference: Reference) -> None:
    if (subject, reference) == (Subject.BASELINE, Reference.BASELINE):
        return
    record = bench.measure(PLACED, KERNEL, BASELINE, seeds=2)
    heads = [head(head=number, seed=1, subject=subject, reference=reference) for number in range(8)]
    deviation = Deviation.between(torch.stack([h.x for h in heads]), torch.stack([h.reference for h in heads]), heads[0].fmt)
    (row,) = only(record, seed=1, subject=subject, output="out", reference=reference)
    assert (deviation.max_difference, deviation.equal_share) == (row["max_difference"], row["equal_share"])
    assert heads[0].output == "out"


def test_each_output_has_heads_of_its_own_number_and_a_vector_is_one_column() -> None:
    variant = TiledBackward(KERNEL, BackwardPrecision.parse("bf16"), KERNEL.tiling)
    made = {name: head(variant, None, output=name) for name in ("dq", "dk", "dv", "delta")} | {"lse": head(output="lse", head=7)}
    assert {name: (tuple(h.x.shape), h.heads) for name, h in made.items()} == {
        "dq": ((12, 8), 8),
        "dk": ((16, 8), 4),
        "dv": ((16, 8), 4),
        "delta": ((12, 1), 8),
        "lse": ((12, 1), 8),
    }


CAPTURED = Problem(Captured(), Shape(queries=8, keys=8, head_dim=32))


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"output": "dq"}, "output"),
        ({"head": 8}, "head"),
        ({"head": -1}, "head"),
        ({"seed": -1}, "seed"),
        ({"subject": Subject.BASELINE, "reference": Reference.BASELINE}, "reference"),
        ({"baseline": None, "subject": Subject.BASELINE}, "baseline"),
        ({"problem": CAPTURED, "seed": 24}, "seed"),
    ],
)
def test_what_there_is_not_is_refused_by_name(parts: dict[str, Any], field: str) -> None:
    assert head(problem=CAPTURED, seed=23).heads == 1
    with pytest.raises(BadInput) as refused:
        head(**parts)
    assert refused.value.field == field
