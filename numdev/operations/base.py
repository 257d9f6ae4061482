"""The parts that operations of one file share: problems from a seed, policies, kernels of torch and of Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.elementary import Operation as Elementary
from numdev.arithmetic.elementary import RoundedOnce
from numdev.arithmetic.formats import BF16, FP16, FP32, FP64, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.kernels.launch import held_dtype, interpreting, triton_version
from numdev.attention.precision import Policy
from numdev.errors import BadInput, Unsupported
from numdev.measurement.operation import Draws, RoundsInputs
from numdev.results.record import Column
from numdev.settings import declared, setting


class Entries(Enum):
    """The distribution of entries: standard normal, uniform in [0, 1), or normal with one in a thousand times 100."""

    NORMAL = "normal"
    UNIFORM = "uniform"
    OUTLIERS = "outliers"

    def draw(self, generator: torch.Generator, *shape: int) -> Tensor:
        """A tensor in FP64, drawn on the CPU."""
        make = torch.rand if self is Entries.UNIFORM else torch.randn
        x = make(*shape, generator=generator, dtype=torch.float64)
        if self is Entries.OUTLIERS:
            x[torch.rand(*shape, generator=generator, dtype=torch.float64) < 1e-3] *= 100
        return x


@dataclass(frozen=True)
class Seeded(Draws):
    """The base of a problem whose inputs are drawn from a seed; its whole numbers are sizes of at least 1."""

    HELD: ClassVar[int] = 12  # tensors like the largest that a measurement holds at once, about

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is int and value < 1:
                raise BadInput(f"problem.{each.name}", value, "give a whole number of at least 1")

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The inputs in FP64, from a generator on the CPU."""
        raise NotImplementedError

    def naive(self, fmt: Format) -> Any:
        """The naive form in a format of torch: the baseline of a variant whose inputs have it."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        raise NotImplementedError

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The inputs in FP64: the same on every device."""
        return {name: x.to(device) for name, x in self.draw(torch.Generator().manual_seed(seed)).items()}

    @property
    def bytes(self) -> int:
        return 8 * self.HELD * self.largest


@dataclass(frozen=True, repr=False)
class Steps(Policy):
    """The base of a policy of one operation; a `kernel` stores inputs and output in its format, all else is in FP32."""

    WIDE: ClassVar[tuple[str, ...]] = ()
    STORED: ClassVar[tuple[str, ...]] = ("inputs", "output")

    def do(self, kind: Elementary, step: str, x: Tensor, y: Tensor | float, left: Format = FP64, right: Format = FP64) -> Tensor:
        """An elementary operation in FP64, rounded once by the cast of a step; formats of its operands save time."""
        x, second = torch.broadcast_tensors(x, torch.as_tensor(y, dtype=x.dtype, device=x.device))
        return RoundedOnce(kind, self._cast(step), left, right, torch.float64)(x.clone(), second)


@dataclass(frozen=True)
class Emulated(RoundsInputs):
    """The base of an implementation that computes under a policy."""

    @property
    def rounds(self) -> Cast:
        return vars(self)["precision"].inputs


@dataclass(frozen=True)
class InDtype(RoundsInputs):
    """The base of what computes on tensors of a dtype of torch; outputs are in `format`, those that `WIDE` names in FP32."""

    FORMATS: ClassVar[tuple[Format, ...]] = (FP64, FP32, BF16, FP16)
    OUTPUTS: ClassVar[tuple[str, ...]] = ()
    WIDE: ClassVar[tuple[str, ...]] = ()

    format: Format = setting(BF16, "inputs and outputs", "format")

    def __post_init__(self) -> None:
        if self.format not in self.FORMATS:
            raise BadInput("variant.format", self.format.name, f"give one of {', '.join(fmt.name for fmt in self.FORMATS)}")

    @property
    def rounds(self) -> Cast:
        return Cast(self.format)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        assert self.format.dtype is not None
        return self.format.dtype

    @property
    def formats(self) -> dict[str, Format]:
        wide = FP64 if self.format == FP64 else FP32
        return {name: wide if name in self.WIDE else self.format for name in self.OUTPUTS}


@dataclass(frozen=True)
class Compiled(InDtype):
    """The base of a Triton kernel, FP32 inside. Interpreted it gets FP32, and the host rounds: the interpreter truncates."""

    FORMATS = InDtype.FORMATS[1:]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return held_dtype(self.format)

    def stored(self, x: Tensor) -> Tensor:
        """An output in the format."""
        return x.to(self.format.dtype)


@dataclass(frozen=True)
class Naive:
    """The rule of a baseline: the naive form in the format of the variant's inputs, in FP32 where torch does not have it."""

    def of(self, variant: Any, problem: Seeded) -> Any:
        """The baseline of a variant on a problem."""
        fmt = variant.rounds.to
        return problem.naive(fmt if fmt in InDtype.FORMATS else FP32)


def jit(function: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """A Triton kernel that is compiled, and triton imported, where it is first launched: `kernel(x)[grid](x, ...)`.

    `x` is one of its tensors. In the module of the kernel `tl` becomes `triton.language`.

    Raises:
        Unsupported: without triton, and off a GPU unless Triton interprets (`TRITON_INTERPRET=1`).
    """

    @functools.lru_cache(maxsize=1)
    def made() -> Any:
        import triton  # late: it is optional
        import triton.language as tl

        function.__globals__["tl"] = tl
        return triton.jit(function)

    @functools.wraps(function)
    def kernel(x: Tensor) -> Any:
        if triton_version() == "none":
            raise Unsupported("variant", "the package triton is not installed; pip install 'numdev[kernels]'")
        if x.device.type != "cuda" and not interpreting():
            raise Unsupported("variant", "Triton kernels need device=cuda, or TRITON_INTERPRET=1 to interpret them")
        return made()

    return kernel


def power_of_two(name: str, value: int, least: int = 16) -> None:
    """Raise BadInput for the side of a block that Triton cannot have."""
    if value < least or value & (value - 1):
        raise BadInput(f"variant.{name}", value, f"give a power of two of at least {least}")


def columns(*kinds: type) -> Callable[[], tuple[Column, ...]]:
    """The settings that a problem, a policy and implementations declare, as `Operation.settings` has them."""

    def made() -> tuple[Column, ...]:
        known: dict[str, Column] = {}
        for kind in kinds:
            place = "problem" if issubclass(kind, Seeded) else "variant.precision" if issubclass(kind, Steps) else "variant"
            for one in declared(kind):
                name = f"{place}.{one.column}"
                known.setdefault(name, Column(name, one.unit, one.text))
        return tuple(known.values())

    return made
