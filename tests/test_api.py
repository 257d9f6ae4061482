"""One call, and the names that the package offers without importing torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import FunctionType

import pytest

import numdev as nd

OFFERED: list[str] = importlib.import_module("numdev").__all__
HEAVY = ("torch", "pandas", "matplotlib", "scipy", "hydra", "numpy", "jaxtyping", "safetensors")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_waits_for_everything_heavy() -> None:
    loaded = python(
        f"import sys, numdev; numdev.__version__; hasattr(numdev, '__path__'); print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert loaded == "[]"


def test_every_public_name_is_there() -> None:
    assert sorted(OFFERED) == OFFERED
    assert len(set(OFFERED)) == len(OFFERED)
    for name in OFFERED:
        assert getattr(nd, name).__module__.startswith("numdev."), name
    assert set(OFFERED) <= set(dir(nd))
    assert isinstance(nd.measure, FunctionType)


@pytest.mark.parametrize("name", ["absent", "_private", "BF16", "lru_cache", "__wrapped__"])
def test_other_names_are_not(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^No numdev attribute {name}$"):
        getattr(nd, name)
    assert name not in dir(nd)


PROBLEM = nd.Problem(nd.Distribution(nd.Kind.NORMAL), nd.Shape(queries=16, keys=24, head_dim=8))


def test_a_value_that_cannot_have_an_effect_is_refused() -> None:
    policy = nd.Precision.parse("bf16")
    for variant, field in (
        (nd.Tiled(policy, nd.Tiling(16, 16, splits=100)), "tiling.splits"),
        (nd.Tiled(policy.with_step(row_sum="bf16@1000"), nd.Tiling(16, 16)), "precision.row_sum"),
        (nd.Tiled(policy, nd.Tiling(16, 32), nd.OnlineSoftmax(exp=nd.Exponential.parse("exp2_fa4"))), "softmax.exp"),
        (nd.Triton(bc=16, splits=100), "tiling.splits"),
    ):
        with pytest.raises(nd.BadInput, match=f"^{field}: .*; give "):
            nd.measure(PROBLEM, variant, seeds=1, device="cpu")
