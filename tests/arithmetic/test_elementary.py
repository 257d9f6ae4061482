"""Every elementary operation whose result numdev relies on bit for bit, against exact rational and integer arithmetic.

numdev relies on these, on every processor and by every path of the libraries; `make numerics` takes two of them:

- `+ - * /` in FP32 and FP64, also with a number in place of a tensor, rounded once to nearest even, subnormal numbers kept;
- conversions: FP64 to FP32, FP32 to BF16 and FP16, and every one that is exact;
- `round floor ceil trunc remainder frexp copysign abs clamp maximum amax` and comparisons, which do not round, and shifts and
  masks of bits; the tests of casts (`test_rounding.py`) go through these and the conversions at every breakpoint;
- `exp2` of whole numbers, which is exact;
- of `exp` and `log` no correct rounding, but that the result depends on the argument alone, not on its place in a tensor;
- NumPy's square root in FP64. No other root: torch's is an ulp off for a fifth of FP32 arguments on some AMD processors.

Each is tested at the places of tensors of 1 to 67 elements, in the body and in the tail of a vector loop, and with gaps.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from numdev.sources import PACKAGE

Binary = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Carrier:
    """A dtype, the integers of its width, its precision, and the exponents of its normal numbers."""

    dtype: torch.dtype
    integer: torch.dtype
    precision: int
    least: int
    most: int

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def bits(self) -> int:
        return torch.finfo(self.dtype).bits

    def rounded(self, exact: Fraction) -> float:
        """To nearest even, from the definition (IEEE 754-2019, section 4.3.1)."""
        if exact == 0:
            return 0.0
        exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > abs(exact)
        quantum = Fraction(2) ** (max(exponent, self.least) - self.precision + 1)
        result = round(exact / quantum) * quantum  # Python rounds a fraction to the nearest, a tie to the even number
        beyond = math.inf if exact > 0 else -math.inf
        return beyond if abs(result) >= Fraction(2) ** (self.most + 1) else float(result)

    def random(self, count: int, seed: int) -> Tensor:
        """Bit patterns, so every exponent is as likely as any other; finite ones."""
        high = 2 ** (self.bits - 1)
        generator = torch.Generator().manual_seed(seed)
        result = (
            torch.randint(-high, high - 1, (2 * count,), generator=generator, dtype=torch.int64).to(self.integer).view(self.dtype)
        )
        return result[result.isfinite()][:count].clone()

    def awkward(self) -> Tensor:
        """Both ends of the normal and subnormal numbers, neighbours of powers of two, ties."""
        u = 2.0**-self.precision
        positive = [0.0, 1.0, 1.5, 2.0, 3.0, 1 / 3, 0.1, 0.7, 10.0]
        positive += [1 + 2 * u, 1 - u, 2 - 2 * u, u, 2 * u, 1 / u, 1 / u - 1, 2 / u - 1]
        positive += [math.ldexp(1, self.least - self.precision + k) for k in (1, 2, self.precision - 1, self.precision)]
        positive += [math.ldexp(1, self.least) * (1 - 2 * u), math.ldexp(2 - 2 * u, self.most), math.ldexp(1, self.most // 2)]
        return torch.tensor(positive + [-value for value in positive], dtype=torch.float64).to(self.dtype)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Every pair of awkward numbers, random pairs, and pairs of like size, whose sums and quotients are the hard ones."""
        few = self.awkward()
        x, y = few.repeat_interleave(few.numel()), few.repeat(few.numel())
        a, b = self.random(6000, 1), self.random(6000, 2)
        near = 1 + torch.rand(6000, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(self.dtype)
        far = near.flip(0) * torch.tensor([2.0**-k for k in range(30)], dtype=self.dtype).repeat(200)
        return torch.cat([x, a, near]), torch.cat([y, b, far])


FP32 = Carrier(torch.float32, torch.int32, 24, -126, 127)
FP64 = Carrier(torch.float64, torch.int64, 53, -1022, 1023)
CARRIERS = pytest.mark.parametrize("carrier", [FP32, FP64], ids=str)
ARITHMETIC: dict[str, tuple[Binary, Callable[[Any, Any], Any]]] = {
    "add": (torch.add, operator.add),
    "subtract": (torch.sub, operator.sub),
    "multiply": (torch.mul, operator.mul),
    "divide": (torch.div, operator.truediv),
}


def bits(x: Tensor) -> Tensor:
    """To compare zeros with their signs."""
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x)[~(x.isnan() & y.isnan())], bits(y)[~(x.isnan() & y.isnan())])


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


def transposed(x: Tensor) -> Tensor:
    """Lays numbers out column by column in memory, in their order: no operation may copy them first."""
    return x[: x.numel() // 6 * 6].reshape(6, -1).T.contiguous().T


def check_places(operation: Callable[..., Tensor], *tensors: Tensor) -> None:
    """An element's result is the same wherever it stands; one element alone is the reference."""
    count = min(tensors[0].numel(), 3000)
    few = [t[:count].clone() for t in tensors]
    alone = torch.cat([operation(*(t[i : i + 1].clone() for t in few)) for i in range(count)])
    for part, placed in layouts(*few):
        assert same(operation(*placed), alone[part]), part
    turned = operation(*(transposed(t) for t in few))
    assert same(turned.reshape(-1), alone[: turned.numel()])
    many = operation(*(t.repeat(70_000 // count + 1) for t in few))  # enough for several threads
    assert same(many, alone.repeat(70_000 // count + 1))


@CARRIERS
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_rounded_once(carrier: Carrier, name: str) -> None:
    operation, exact = ARITHMETIC[name]
    x, y = carrier.pairs()
    if name == "divide":
        x, y = x[y != 0], y[y != 0]
    result = operation(x, y)
    for a, b, c in zip(x.tolist(), y.tolist(), result.tolist(), strict=True):
        assert c == carrier.rounded(exact(Fraction(a), Fraction(b))), (a, b)
    assert same(getattr(x.clone(), f"{operation.__name__}_")(y), result), "in place"


PLACED: dict[str, Callable[..., Tensor]] = {
    **{name: operation for name, (operation, _) in ARITHMETIC.items()},
    **{name: getattr(torch, name) for name in ("exp", "round", "floor", "ceil", "trunc")},
    "log": lambda x: torch.log(x.abs()),
    "exponent": lambda x: torch.frexp(x)[1].to(x.dtype),
    "to bf16": lambda x: x.float().bfloat16().float(),
    "to fp16": lambda x: x.float().half().float(),
}


@CARRIERS
@pytest.mark.parametrize("name", PLACED)
def test_a_result_depends_on_the_argument_alone(carrier: Carrier, name: str) -> None:
    """A row's result must not depend on the rows beside it."""
    x, y = (t[-3000:] for t in carrier.pairs())
    arguments = (x, y) if name in ARITHMETIC else (torch.cat([x[:1500] * 20, carrier.random(1500, 8)]),)
    check_places(PLACED[name], *arguments)
    if name in ("exp", "log"):
        assert same(getattr(x.abs().clone(), f"{name}_")(), getattr(torch, name)(x.abs())), "in place"


@CARRIERS
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("number", [0.7, 127.0, 1 / math.sqrt(80), math.log2(math.e), 256.0, 3.0, 1e-30])
def test_a_number_is_rounded_to_the_tensors_dtype_first(carrier: Carrier, name: str, number: float) -> None:
    """And then the operation is that of two tensors: a division is no product with the reciprocal."""
    operation, x = ARITHMETIC[name][0], carrier.pairs()[0]
    narrow = torch.tensor(carrier.rounded(Fraction(number)), dtype=torch.float64).to(carrier.dtype)
    assert float(narrow) == carrier.rounded(Fraction(number))
    both = operation(x, narrow.expand(x.shape).contiguous())
    assert same(operation(x, number), both)  # type: ignore[arg-type]
    assert same(torch.full_like(x, number), narrow.expand(x.shape).contiguous())


SPECIAL = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    **{"maximum": np.maximum, "copysign": np.copysign, "lt": np.less, "le": np.less_equal, "eq": np.equal},
}


@CARRIERS
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers_are_what_they_are_to_numpy(carrier: Carrier, name: str) -> None:
    """NaN is unordered and stays; zeros have signs; infinities are those of IEEE 754-2019, sections 6 and 7.2 to 7.4."""
    top, inf = float(torch.finfo(carrier.dtype).max), math.inf
    x = torch.cat([torch.tensor([math.nan, -inf, inf, 0.0, -0.0, 1.0, -1.0, top, -top], dtype=carrier.dtype), carrier.awkward()])
    a, b = x.repeat_interleave(x.numel()), x.repeat(x.numel())
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(SPECIAL[name](a.numpy(), b.numpy()))
    assert same(getattr(torch, name)(a, b).to(carrier.dtype), expected.to(carrier.dtype))


@CARRIERS
def test_the_largest_is_nan_where_one_is_and_nothing_is_lost_in_the_tail(carrier: Carrier) -> None:
    x = carrier.random(67, 7)
    for length in range(1, 68):
        assert float(x[:length].amax()) == max(x[:length].tolist())
        assert float(torch.remainder(x[:length].trunc(), 2)[-1]) == math.trunc(float(x[length - 1])) % 2
        for place in (0, length // 2, length - 1):
            assert bool(x[:length].clone().index_fill_(0, torch.tensor([place]), math.nan).amax().isnan())


@CARRIERS
def test_exp2_of_whole_numbers_is_exact(carrier: Carrier) -> None:
    """All that there are: from below the smallest subnormal number to beyond the largest, at every place."""
    whole = list(range(carrier.least - carrier.precision - 40, carrier.most + 40))
    x = torch.tensor(whole, dtype=carrier.dtype)
    expected = torch.tensor([carrier.rounded(Fraction(2) ** k) for k in whole], dtype=torch.float64).to(carrier.dtype)
    assert torch.equal(torch.exp2(x), expected)
    assert torch.exp2(torch.tensor([-math.inf, math.inf], dtype=carrier.dtype)).tolist() == [0.0, math.inf]
    check_places(torch.exp2, x)
    for start in range(x.numel()):  # each at each place of a short tensor
        part = x[start : start + 19]
        assert torch.equal(torch.exp2(part), expected[start : start + 19])


def test_numpys_root_is_correctly_rounded() -> None:
    """`y` is the nearest number to a root iff x lies between the squares of the middles beside y; a root is never a middle."""
    x = np.concatenate([FP64.random(6000, 9).abs().numpy(), np.linspace(0.5, 4, 4000), FP64.awkward().abs().numpy()])
    for value, root in zip(x.tolist(), np.sqrt(x).tolist(), strict=True):
        if value:
            low, high = ((Fraction(root) + Fraction(math.nextafter(root, side))) / 2 for side in (0.0, math.inf))
            assert low**2 < Fraction(value) < high**2
    for length in range(1, 68):
        assert np.array_equal(np.sqrt(x[:length]), np.sqrt(x)[:length])
    assert np.array_equal(np.sqrt(x[::3]), np.sqrt(x)[::3])


NOT_TRUSTED = {"sqrt", "rsqrt", "reciprocal", "pow", "float_power", "hypot", "lerp", "addcmul", "addcdiv", "exp10", "log10"}


def test_numdev_uses_no_operation_of_tensors_that_is_not_tested_here() -> None:
    """Roots, reciprocals, powers and fused operations; those of numbers (math, NumPy) are right.

    Training is left out: a model and its optimizer use whatever torch has, and the bits of a run are those of one machine. So are
    certificates, whose roots of mean squares may be off by an ulp.
    """
    used = []
    for path in (
        path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("training", "certification")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or node.attr.rstrip("_") not in NOT_TRUSTED:
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("math", "np")):
                used.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.attr}")
    assert not used
