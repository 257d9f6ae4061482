"""Keys, canonical descriptions, the round trip through JSON, and summaries over replicates."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from numdev.arithmetic.formats import BF16, FP32, Format
from numdev.arithmetic.products import Dot
from numdev.arithmetic.rounding import Cast
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Kind, Problem, Shape, Sink
from numdev.measurement.deviation import COLUMNS
from numdev.results.record import Record, Status, Summary, describe, key_of, summary
from tests.cases import U64

PROBLEM = Problem(Sink(3.0), Shape(2, 4, 2, 8, 9, 16), Mask(True, 5, (3, 9)), scale=0.5)
CONFIG: dict[str, Any] = {"problem": describe(PROBLEM), "seeds": 3}
ENVIRONMENT = {"numdev": "1.0", "torch": "2.13", "threads": "1"}
FIGURES = st.one_of(st.floats(), st.integers(-(2**40), 2**40))


def record(rows: list[dict[str, Any]] | None = None, counters: list[dict[str, Any]] | None = None, **changes: Any) -> Record:
    fields: dict[str, Any] = {"kind": "deviation", "operation": "attention", "outputs": ("out", "lse")}
    fields |= {"columns": {"deviation": COLUMNS, "counters": (COLUMNS[0],)}, "config": CONFIG, "environment": ENVIRONMENT}
    tables = {"deviation": rows or [], "counters": counters or []}
    made = Record(key=key_of(CONFIG, ENVIRONMENT), status=Status.OK, tables=tables, **fields)
    return replace(made, **changes)


def test_keys_do_not_depend_on_the_order_of_names() -> None:
    config, environment = json.loads(json.dumps([CONFIG, ENVIRONMENT]), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert list(config) != list(CONFIG)
    assert key_of(config, environment) == key_of(CONFIG, ENVIRONMENT)
    assert len(key_of(CONFIG, ENVIRONMENT)) == 32


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_difference_is_another_key(name: str) -> None:
    """In whatever a description holds, which `tests.cli.test_honoured` shows of every setting."""
    other = CONFIG | {"problem": describe(replace(PROBLEM, scale=None))}
    assert len({key_of(CONFIG, ENVIRONMENT), key_of(other, ENVIRONMENT), key_of(CONFIG, ENVIRONMENT | {name: "x"})}) == 3


def test_the_form_of_a_description() -> None:
    assert describe(PROBLEM) == {
        "type": "Problem",
        "source": {"type": "Sink", "kind": "sink", "rise": 3.0},
        "shape": {"type": "Shape", "batch": 2, "heads": 4, "kv_heads": 2, "queries": 8, "keys": 9, "head_dim": 16},
        "mask": {
            "type": "Mask",
            "causal": True,
            "window": 5,
            "key_lengths": [3, 9],
            **dict.fromkeys(("bias", "softcap", "dropout")),
        },
        "scale": 0.5,
    }
    assert describe(Precision.kernel(BF16)) == Precision.kernel(BF16).steps() | {"name": "kernel_bf16"}
    assert describe([Cast(BF16), Dot(Cast(FP32), 16), Format(4, 3), Kind.TIED, None, {1: (True, 2.5)}]) == [
        "bf16",
        "fp32@16",
        "e4m3",
        "tied",
        None,
        {"1": [True, 2.5]},
    ]


@dataclass(frozen=True)
class Toy:
    factor: float | None
    count: int


@given(st.integers(-(2**50), 2**50))
def test_equal_objects_have_equal_descriptions(whole: int) -> None:
    """A whole number where a fraction might stand is equal to that fraction, and so must be the text that is hashed."""
    assert Toy(whole, whole) == Toy(float(whole), whole)
    assert json.dumps(describe(Toy(whole, whole))) == json.dumps(describe(Toy(float(whole), whole)))
    assert json.dumps(describe(Toy(None, whole))) == f'{{"type": "Toy", "factor": null, "count": {whole}}}'


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, Toy, lambda: 0, np.float32(1.0), {"a": object()}, [Toy]])
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="has no canonical form"):
        describe(value)


def test_keys_refuse_nan() -> None:
    """NaN differs from itself: a configuration that holds one would be found again by its text and by nothing else."""
    with pytest.raises(ValueError, match="JSON"):
        key_of({"scale": math.nan}, ENVIRONMENT)


def bits(value: float) -> bytes:
    return struct.pack("<d", value) if isinstance(value, float) and not math.isnan(value) else repr(value).encode()


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.text(max_size=5), FIGURES, max_size=5), max_size=4), st.text(max_size=20), st.floats(0, 1e9))
def test_the_round_trip_is_bit_exact(rows: list[dict[str, float]], reason: str, seconds: float) -> None:
    one = record(rows=rows, reason=reason, seconds=seconds, status=Status.NONFINITE, counters=[{"seed": 0, "x": math.inf}])
    again = Record.from_json(one.to_json())
    counters = {"counters": [{"seed": 0, "x": math.inf}]}
    assert replace(again, tables=counters) == replace(one, tables=counters)
    assert again.table("counters") == one.table("counters")
    assert [{k: bits(v) for k, v in r.items()} for r in again.rows] == [{k: bits(v) for k, v in r.items()} for r in rows]


def test_torn_records_are_refused() -> None:
    made = record(rows=[{"seed": 0, "rmse": 1.5}])
    whole = made.to_json()
    assert Record.from_json(whole) == made
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="."):
            Record.from_json(whole[:end])


def test_a_record_without_its_long_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="kept apart"):
        Record.from_json(record().to_json({"deviation": {"file": "x.parquet"}}))


@pytest.mark.parametrize("count", [2, 40])
def test_summaries_equal_scipys_interval(count: int) -> None:
    """Both sum n values of size 1 in FP64, a few n u apart; scipy has two codes for the quantile, good to 1e-12 relatively."""
    values = np.random.default_rng(count).normal(3.0, 1.0, count)
    low, high = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
    own = summary(values.tolist())
    loose = (1e-12 + 4 * count * U64) * (high - low)
    assert own.mean == pytest.approx(values.mean(), rel=2 * count * U64)
    assert (own.low, own.high) == pytest.approx((low, high), rel=0, abs=loose + 4 * count * U64 * abs(values).max())
    assert (own.least, own.most, own.count) == (values.min(), values.max(), count)


def test_summaries_of_one_value_of_nan_and_of_infinity() -> None:
    assert summary([2.5]) == Summary(2.5, -math.inf, math.inf, 2.5, 2.5, 1)
    for values in ([math.nan], [1.0, math.nan, 3.0]):
        *figures, count = astuple(summary(values))
        assert count == len(values)
        assert all(map(math.isnan, figures))
    infinite = summary([1.0, math.inf, 2.0])
    assert math.isnan(infinite.mean)
    assert (infinite.least, infinite.most) == (1.0, math.inf)
