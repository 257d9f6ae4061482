"""Every elementary operation whose result numdev relies on bit for bit, against exact rational and integer arithmetic.

numdev relies on these, on every processor and by every path of the libraries; `make numerics` takes two of them:

- `+ - * /` in FP32 and FP64, also with a number in place of a tensor, rounded once to nearest even, subnormal numbers kept;
- conversions: FP64 to FP32, FP32 to BF16 and FP16, and every one that is exact;
- `round floor ceil trunc remainder frexp copysign abs clamp maximum amax` and comparisons, which do not round, and shifts and
  masks of bits; the tests of casts (`test_rounding.py`) go through these and the conversions at every breakpoint;
- `exp2` of whole numbers, which is exact;
- of `exp`, `log` and `tanh` no correct rounding, but that the result depends on the argument alone, not on its place in a tensor;
- NumPy's square root in FP64. No other root: torch's is an ulp off for a fifth of FP32 arguments on some AMD processors.

Each is tested at the places of tensors of 1 to 67 elements, in the body and in the tail of a vector loop, and with gaps.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import FP32, FP64, Format
from numdev.arithmetic.rounding import Overflow, Rounding
from numdev.sources import PACKAGE
from tests.oracles.table import assert_same, round_exactly

Binary = Callable[[Tensor, Tensor], Tensor]
CARRIERS = pytest.mark.parametrize("carrier", [FP32, FP64], ids=str)


def rounded(exact: Fraction, carrier: Format) -> float:
    return round_exactly(exact, carrier, Rounding.NEAREST_EVEN, Overflow.INFINITY)


def random(carrier: Format, count: int, seed: int) -> Tensor:
    """Bit patterns, so every exponent is as likely as any other; finite ones."""
    assert carrier.dtype is not None
    high, generator = 2 ** (carrier.bits - 1), torch.Generator().manual_seed(seed)
    patterns = torch.randint(-high, high - 1, (2 * count,), generator=generator, dtype=torch.int64)
    result = patterns.to(torch.int32 if carrier == FP32 else torch.int64).view(carrier.dtype)
    return result[result.isfinite()][:count].clone()


def awkward(carrier: Format) -> Tensor:
    """Both ends of the normal and subnormal numbers, neighbours of powers of two, ties."""
    u = carrier.u
    positive = [0.0, 1.0, 1.5, 2.0, 3.0, 1 / 3, 0.1, 0.7, 10.0]
    positive += [1 + 2 * u, 1 - u, 2 - 2 * u, u, 2 * u, 1 / u, 1 / u - 1, 2 / u - 1]
    positive += [carrier.min_subnormal * k for k in (1, 2, 2.0 ** (carrier.precision - 2), 2.0 ** (carrier.precision - 1))]
    positive += [carrier.min_normal * (1 - 2 * u), carrier.max, math.ldexp(1, carrier.emax // 2)]
    return torch.tensor(positive + [-value for value in positive], dtype=torch.float64).to(carrier.dtype)


def pairs(carrier: Format) -> tuple[Tensor, Tensor]:
    """Every pair of awkward numbers, random pairs, and pairs of like size, whose sums and quotients are the hard ones."""
    few = awkward(carrier)
    x, y = few.repeat_interleave(few.numel()), few.repeat(few.numel())
    a, b = random(carrier, 6000, 1), random(carrier, 6000, 2)
    near = 1 + torch.rand(6000, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(carrier.dtype)
    far = near.flip(0) * torch.tensor([2.0**-k for k in range(30)], dtype=carrier.dtype).repeat(200)
    return torch.cat([x, a, near]), torch.cat([y, b, far])


ARITHMETIC: dict[str, tuple[Binary, Callable[[Any, Any], Any]]] = {
    "add": (torch.add, operator.add),
    "subtract": (torch.sub, operator.sub),
    "multiply": (torch.mul, operator.mul),
    "divide": (torch.div, operator.truediv),
}


def layouts(*tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Parts of some tensors as they may stand in memory: any length, any start, with gaps, transposed."""
    for length in range(1, 68):
        for lead in (0, 1, 3):
            for start in (0, 41):
                part = slice(start, start + length)
                yield part, tuple(torch.cat([t[:lead], t[part]])[lead:] for t in tensors)
    count = tensors[0].numel() // 6 * 6
    whole = slice(0, count)
    yield whole, tuple(t[whole].repeat_interleave(3)[::3] for t in tensors)
    yield whole, tuple(t[whole].flip(0).contiguous().flip(0) for t in tensors)
    yield whole, tuple(t[whole].reshape(6, -1).T.contiguous().T.reshape(-1) for t in tensors)


def check_places(operation: Callable[..., Tensor], *tensors: Tensor) -> None:
    """An element's result is the same wherever it stands; one element alone is the reference."""
    count = min(tensors[0].numel(), 3000) // 6 * 6
    few = [t[:count].clone() for t in tensors]
    alone = torch.cat([operation(*(t[i : i + 1].clone() for t in few)) for i in range(count)])
    for part, placed in layouts(*few):
        assert_same(operation(*placed), alone[part], placed[0], str(part))
    turned = operation(*(t.reshape(6, -1).T.contiguous().T for t in few))  # column by column, which nothing may copy first
    assert_same(turned.reshape(-1), alone, few[0], "transposed")
    times = 70_000 // count + 1  # enough for several threads
    assert_same(operation(*(t.repeat(times) for t in few)), alone.repeat(times), few[0].repeat(times), "many")


@CARRIERS
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_rounded_once(carrier: Format, name: str) -> None:
    operation, exact = ARITHMETIC[name]
    x, y = pairs(carrier)
    if name == "divide":
        x, y = x[y != 0], y[y != 0]
    result = operation(x, y)
    for a, b, c in zip(x.tolist(), y.tolist(), result.tolist(), strict=True):
        assert c == rounded(exact(Fraction(a), Fraction(b)), carrier), (a, b)
    assert_same(getattr(x.clone(), f"{operation.__name__}_")(y), result, x, "in place")


PLACED: dict[str, Callable[..., Tensor]] = {
    **{name: operation for name, (operation, _) in ARITHMETIC.items()},
    **{name: getattr(torch, name) for name in ("exp", "tanh", "round", "floor", "ceil", "trunc")},
    "log": lambda x: torch.log(x.abs()),
    "exponent": lambda x: torch.frexp(x)[1].to(x.dtype),
    "to bf16": lambda x: x.float().bfloat16().float(),
    "to fp16": lambda x: x.float().half().float(),
}


@CARRIERS
@pytest.mark.parametrize("name", PLACED)
def test_a_result_depends_on_the_argument_alone(carrier: Format, name: str) -> None:
    """A row's result must not depend on the rows beside it."""
    x, y = (t[-3000:] for t in pairs(carrier))
    arguments = (x, y) if name in ARITHMETIC else (torch.cat([x[:1500] * 20, random(carrier, 1500, 8)]),)
    check_places(PLACED[name], *arguments)
    if name in ("exp", "log", "tanh"):
        assert_same(getattr(x.abs().clone(), f"{name}_")(), getattr(torch, name)(x.abs()), x, "in place")


@CARRIERS
@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_number_is_rounded_to_the_tensors_dtype_first(carrier: Format, name: str) -> None:
    """And then the operation is that of two tensors: a division is no product with the reciprocal."""
    operation, x = ARITHMETIC[name][0], pairs(carrier)[0]
    for number in (0.7, 127.0, 1 / math.sqrt(80), math.log2(math.e), 256.0, 3.0, 1e-30):
        narrow = torch.full_like(x, number)
        assert float(narrow[0]) == rounded(Fraction(number), carrier)
        assert_same(operation(x, number), operation(x, narrow), x, str(number))  # type: ignore[arg-type]


SPECIAL = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    **{"maximum": np.maximum, "copysign": np.copysign, "lt": np.less, "le": np.less_equal, "eq": np.equal},
}


@CARRIERS
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers_are_what_they_are_to_numpy(carrier: Format, name: str) -> None:
    """NaN is unordered and stays; zeros have signs; infinities are those of IEEE 754-2019, sections 6 and 7.2 to 7.4."""
    special = torch.tensor([math.nan, -math.inf, math.inf, 0.0, -0.0], dtype=carrier.dtype)
    x = torch.cat([special, awkward(carrier)])
    a, b = x.repeat_interleave(x.numel()), x.repeat(x.numel())
    with np.errstate(all="ignore"):
        assert_same(getattr(torch, name)(a, b), SPECIAL[name](a.numpy(), b.numpy()), a, name)


@CARRIERS
def test_the_largest_is_nan_where_one_is_and_nothing_is_lost_in_the_tail(carrier: Format) -> None:
    x = random(carrier, 67, 7)
    for length in range(1, 68):
        assert float(x[:length].amax()) == max(x[:length].tolist())
        assert float(torch.remainder(x[:length].trunc(), 2)[-1]) == math.trunc(float(x[length - 1])) % 2
        for place in (0, length // 2, length - 1):
            assert bool(x[:length].clone().index_fill_(0, torch.tensor([place]), math.nan).amax().isnan())


@CARRIERS
def test_exp2_of_whole_numbers_is_exact(carrier: Format) -> None:
    """All that there are: from below the smallest subnormal number to beyond the largest, at every place."""
    whole = list(range(carrier.emin - carrier.precision - 40, carrier.emax + 40))
    x = torch.tensor([-math.inf, *whole, math.inf], dtype=carrier.dtype)
    exact = [0.0, *(rounded(Fraction(2) ** k, carrier) for k in whole), math.inf]
    expected = torch.tensor(exact, dtype=torch.float64).to(carrier.dtype)
    assert torch.equal(torch.exp2(x), expected)
    check_places(torch.exp2, x)
    for start in range(x.numel()):  # each at each place of a short tensor
        assert torch.equal(torch.exp2(x[start : start + 19]), expected[start : start + 19])


def test_numpys_root_is_correctly_rounded() -> None:
    """`y` is the nearest number to a root iff x lies between the squares of the middles beside y; a root is never a middle."""
    x = np.concatenate([random(FP64, 6000, 9).abs().numpy(), np.linspace(0.5, 4, 4000), awkward(FP64).abs().numpy()])
    for value, root in zip(x.tolist(), np.sqrt(x).tolist(), strict=True):
        if value:
            low, high = ((Fraction(root) + Fraction(math.nextafter(root, side))) / 2 for side in (0.0, math.inf))
            assert low**2 < Fraction(value) < high**2
    for length in range(1, 68):
        assert np.array_equal(np.sqrt(x[:length]), np.sqrt(x)[:length])
    assert np.array_equal(np.sqrt(x[::3]), np.sqrt(x)[::3])


NOT_TRUSTED = {
    "sqrt",
    "rsqrt",
    "reciprocal",
    "pow",
    "float_power",
    "hypot",
    "lerp",
    "addcmul",
    "addcdiv",
    "exp10",
    "log10",
    "cosh",
}


def test_numdev_uses_no_operation_of_tensors_that_is_not_tested_here() -> None:
    """Roots, reciprocals, powers, hyperbolic sines and fused operations; those of numbers (math, NumPy) are right.

    Training is left out: a model and its optimizer use whatever torch has, and the bits of a run are those of one machine. So are
    certificates, whose roots of mean squares may be off by an ulp, and other operations than attention, whose roots in FP64 are
    then rounded to a narrower format.
    """
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("training", "certification", "operations"):
            attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
            used = [node for node in attributes if node.attr.rstrip("_") in NOT_TRUSTED]
            assert not [node for node in used if ast.unparse(node.value) not in ("math", "np")], path
