"""The data dictionary knows every setting that a configuration can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from numdev import Cast
from numdev.arithmetic.formats import E4M3FN
from numdev.arithmetic.quantise import Quantised
from numdev.attention.captured import Captured
from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.naive import Naive
from numdev.attention.operation import ATTENTION
from numdev.attention.precision import Precision
from numdev.attention.problem import DISTRIBUTIONS, Problem
from numdev.attention.tiled import Tiled
from numdev.attention.triton import Kernel, Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flash_attn import FlashAttn
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sage import SageAttention
from numdev.attention.vendor.sdpa import Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.measurement.speed import Budget
from numdev.report.reading import columns as dictionary
from numdev.report.reading.columns import meaning
from numdev.report.reading.frames import Results, flatten, load
from numdev.results.record import Column, describe
from numdev.results.store import Store
from numdev.results.study import Refused

FP8 = Precision.fp8()
VARIANTS = [Tiled(FP8), Naive(FP8), Exact(), Triton(), Sdpa(), Flex(), Vanilla(), Instrumented(FP8), Custom("math:sqrt")]
VARIANTS += [FlashAttn(), SageAttention(), Triton(E4M3FN, kernel=Kernel.HOPPER, quantise=Quantised(Cast(E4M3FN)))]
KNOWN = {column.name: column for column in ATTENTION.settings()}
REFUSED = Refused("sdpa", "tiling.br=16")
CONFIGURATION = tuple(f"{part}." for part in dictionary.PARTS)


def setting(column: str) -> tuple[str, str] | None:
    return dictionary.setting(column, KNOWN)


def is_declared(column: str) -> bool:
    found = setting(column)
    return found is not None and not found[1].startswith("a setting of the class")


def every_column(tmp_path: Path) -> dict[str, Any]:
    save_file({f"a.{name}": torch.ones(1, 4, 4) for name in "qkv"}, tmp_path / "own.safetensors")
    problems = [*(Problem(kind()) for kind in DISTRIBUTIONS), Problem(Captured(str(tmp_path / "own.safetensors")))]
    parts: list[tuple[str, Any]] = [("timing", Budget()), *(("problem", problem) for problem in problems)]
    parts += [(part, variant) for part in ("variant", "baseline") for variant in (*VARIANTS, REFUSED)]
    return {name: value for part, it in parts for name, value in flatten({part: describe(it)}).items()}


def test_every_setting_of_every_class_is_known(tmp_path: Path) -> None:
    columns = every_column(tmp_path)
    assert {"variant.precision.quantise.hadamard", "problem.source.digest", "variant.backend"} <= set(columns)
    assert [name for name in columns if not is_declared(name)] == []


def test_nothing_is_explained_that_there_is_not(tmp_path: Path) -> None:
    assert {*KNOWN, *dictionary.TIMING} - set(every_column(tmp_path)) == set()


@pytest.fixture(scope="module")
def results(toy_results: Store) -> Results:
    return load(toy_results)


def test_every_column_that_a_study_writes_has_a_meaning(results: Results) -> None:
    columns = sorted({*map(str, results.points), *map(str, results.rows)})
    settings = [name for name in columns if name.startswith(CONFIGURATION)]
    assert len(settings) > 50
    stated = results.columns | dictionary.settings(results.manifests.values())
    assert [name for name in columns if not (meaning(name, stated) or ("", ""))[1]] == []


def test_two_operations_in_one_store_are_both_heard() -> None:
    one, other = ({"settings": {"problem.rows": ["tokens", text]}} for text in ("of q", "of x"))
    found = dictionary.settings([one, other, one, {}])
    assert found == {"problem.rows": Column("problem.rows", "tokens", "of q; or: of x")}


def test_a_setting_of_a_class_of_ones_own_is_said_to_be_one() -> None:
    assert meaning("variant.wheels") == ("", "a setting of the class that stands in `variant.type`")
    assert meaning("wheels") is None
    assert meaning("variant") is None
