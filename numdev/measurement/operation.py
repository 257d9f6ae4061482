"""Facts that a measurement must know of an operation: its inputs, outputs, steps and golden, as the operation declares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.arithmetic.rounding import Cast
from numdev.errors import Unsupported
from numdev.results.record import Column


@runtime_checkable
class Outputs(Protocol):
    """Named tensors, and events that the run counted."""

    @property
    def counters(self) -> dict[str, float]: ...
    @property
    def kernel(self) -> str:
        """The compiled kernel that really ran; empty for tensor operations."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...


@runtime_checkable
class Measurable(Protocol):
    """An implementation of an operation.

    `formats` has the format of each output that it can return, by name, the primary one first.
    """

    @property
    def formats(self) -> Mapping[str, Format]: ...
    @property
    def input_key(self) -> Hashable:
        """Equal for implementations whose `round_inputs` is the same function."""
        ...

    def round_inputs(self, *inputs: Any, **named: Any) -> tuple[Tensor, ...]: ...
    def __call__(self, *inputs: Any, **arguments: Any) -> Outputs: ...


@runtime_checkable
class Reproducible(Protocol):
    """A problem: the arguments that go with its inputs, which replicates are correlated, and its memory."""

    def arguments(self) -> dict[str, Any]: ...
    def cluster(self, seed: int) -> str: ...
    @property
    def bytes(self) -> int: ...


@runtime_checkable
class Random(Protocol):
    """An implementation that draws random numbers, different ones in each replicate."""

    def replicate(self, seed: int) -> Measurable: ...


@runtime_checkable
class Rule(Protocol):
    """A baseline that follows from what is measured: the node of a baseline may make one in place of the baseline itself."""

    def of(self, variant: Any, problem: Any) -> Any:
        """The baseline of a variant on a problem; None for none."""
        ...


@dataclass(frozen=True)
class NoBaseline:
    """The rule that there is none: the variant is compared with golden alone."""

    def of(self, variant: Any, problem: Any) -> None:
        """No baseline."""


@dataclass(frozen=True)
class Cost:
    """Cost of one call by a model."""

    operations: int | float = math.nan  # operations that any algorithm must do; NaN if unknown
    algorithm: str = ""  # the algorithm whose traffic is counted; empty without a model
    model_bytes: int | float = math.nan  # traffic with the processor's memory; NaN without a model
    model_br: int = 0  # rows of a tile in the model; 0 without tiles


Beside = tuple[Callable[[], Any], Cost]  # a call that is timed beside the measured one, and what it costs by a model


@dataclass(frozen=True)
class Workload:
    """Defaults for an operation of which nothing more is known; an operation overrides what it knows."""

    # Calls that are timed beside the measured one: their names, and what each is
    beside: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def sample(self, problem: Any) -> Any:
        """The part of a problem that is drawn, and whose result is compared with golden."""
        return problem

    def held(self, problem: Any, variant: Any, rounded: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs of the whole problem as a call takes them, from the rounded ones of the sample."""
        return rounded

    def compared(self, problem: Any, output: Tensor) -> Tensor:
        """The part of the primary output that belongs to the sample."""
        return output

    def needed_bytes(self, problem: Any, variant: Any) -> int:
        """Memory that a call needs at least."""
        return int(problem.bytes)

    def cost(self, problem: Any, variant: Any, output: Any, device: torch.device) -> Cost:
        """The cost of a call that returned `output`, by a model of the variant."""
        return Cost()

    def is_tf32(self, variant: Any) -> bool:
        """Whether its products of FP32 are in TF32, which decides what rate they are compared with."""
        return False

    def bound(self, problem: Any, variant: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        """The call that is measured, without work that the variant does only for its caller; preparations are done here."""
        return partial(variant, *inputs, **problem.arguments())

    def calls_beside(self, problem: Any, variant: Any, inputs: tuple[Tensor, ...], device: torch.device) -> dict[str, Beside]:
        """Each of `beside`, on the same inputs."""
        return {}

    def forget(self) -> None:
        """Release what the last point left in memory; the next point has another problem."""


@dataclass(frozen=True)
class Result:
    """The outputs of one call by name, the primary one first, and the events that the run counted."""

    outputs: Mapping[str, Tensor]
    counters: dict[str, float] = field(default_factory=dict)
    kernel: str = ""

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.outputs)


class Draws:
    """The defaults of a problem whose replicates are independent draws, and of which implementations take tensors alone."""

    def arguments(self) -> dict[str, Any]:
        return {}

    def replicates(self, seeds: int | None = None) -> int:
        """Ten, unless a number is given."""
        return 10 if seeds is None else seeds

    def cluster(self, seed: int) -> str:
        return ""


class RoundsInputs:
    """The defaults of an implementation that rounds each of its inputs once: by its `rounds`, to its `dtype`."""

    dtype: torch.dtype = torch.float64

    @property
    def rounds(self) -> Cast:
        """The cast of the inputs."""
        raise NotImplementedError

    @property
    def input_key(self) -> Hashable:
        return self.rounds, self.dtype

    def round_inputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.rounds(x.double()).to(self.dtype) for x in inputs)


@dataclass(frozen=True)
class Inputs:
    """Inputs that one rule draws together."""

    names: tuple[str, ...]  # names of the inputs, in the order in which an implementation takes them
    # The rule, from problem, seed and device to tensors by name; the same problem and seed give the same numbers in FP64 on every
    # device. None for what the problem itself draws: `problem.inputs(seed, device)`.
    draw: Callable[[Any, int, torch.device], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class Output:
    """One of the named results."""

    name: str  # by which an implementation returns it and states its format
    meaning: str  # one sentence
    # Whether it is a matrix `[..., tokens, dim]` for each head of which the rank and the direction of the error are recorded too
    directed: bool = False


def _no_facts(of: object) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Operation:
    """An operation, such as attention: what all its implementations have in common.

    You can add an operation without changing numdev. If `Sum` and `Numbers` are classes with the methods of `Measurable` and
    `Reproducible`:

        >>> TOTAL = Operation(
        ...     name="sum",
        ...     golden=Sum(FP64),
        ...     inputs=(Inputs(("x",)),),                 # drawn by `Numbers.inputs(seed, device)`
        ...     outputs=(Output("total", "sum of x"),),   # `Sum.formats` has a format for it
        ...     steps=("inputs", "additions", "output"),  # of the policy that its implementations follow
        ... )
        >>> Runner(Deviations(TOTAL), "cpu").measure(Numbers(1000), Sum(BF16), seeds=10)

    Each further input is another `Inputs` with its own rule.
    """

    name: str  # name of the operation, as records state it
    # The exact implementation, a `Measurable` unless a kind of its own measures it; None if there is none, as for training, whose
    # runs are compared with one another
    golden: Any
    inputs: tuple[Inputs, ...]  # named inputs, with the rules that draw them
    outputs: tuple[Output, ...]  # named outputs, the primary one first; a variant gives each a format of its own
    # The dimension of inputs and outputs, by name, along which they have rows that are independent of one another, as tokens or
    # batch entries are; an input without any is shared by all rows.
    rows: Mapping[str, int] = field(default_factory=dict, hash=False)
    # The dimension along which the last places of a row may be computed alone, the other inputs whole: queries, as in decoding
    suffix: Mapping[str, int] = field(default_factory=dict, hash=False)
    steps: tuple[str, ...] = ()  # the names of the steps of its precision policy, in the order of execution
    counters: tuple[Column, ...] = ()  # events that a run may count: the columns of the table `counters`
    # What the settings of its problems and variants mean, as columns `problem.<setting>` and `variant.<setting>`; a study's
    # manifest keeps them for its readers.
    settings: Callable[[], tuple[Column, ...]] = tuple
    # What follows from the configuration of a point, by column, such as the format of its output; its record keeps it
    facts: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_facts
    # Facts beyond those of torch and the processor that may change a result on a device
    environment: Callable[[torch.device], dict[str, str]] = _no_facts
    workload: Workload = field(default_factory=Workload)  # what a measurement of speed must know of the operation
    smaller: str = "a smaller problem"  # what to use if memory does not suffice; completes the sentence "use ..."

    @property
    def exact(self) -> Measurable:
        """`golden`.

        Raises:
            Unsupported: where there is none.
        """
        if self.golden is None:
            raise Unsupported("operation", f"{self.name} has no exact result from which a deviation could be measured")
        exact: Measurable = self.golden
        return exact

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.outputs)

    @property
    def directed(self) -> tuple[str, ...]:
        """The names of the outputs whose errors have a rank and a direction."""
        return tuple(output.name for output in self.outputs if output.directed)

    @property
    def primary(self) -> str:
        """The name of the primary output."""
        return self.outputs[0].name

    def draw(self, problem: Any, seed: int, device: torch.device) -> tuple[Tensor, ...]:
        """Every input of a replicate, in the order in which an implementation takes them."""
        drawn: list[Tensor] = []
        for inputs in self.inputs:
            tensors = inputs.draw(problem, seed, device) if inputs.draw is not None else problem.inputs(seed, device)
            drawn += (tensors[name] for name in inputs.names)
        return tuple(drawn)

    def prepared(self, problem: Any, variant: Any, seed: int, device: torch.device) -> tuple[Tensor, ...]:
        """Inputs in the form in which the variant takes them, so that a timed call converts nothing."""
        drawn = self.draw(self.workload.sample(problem), seed, device)
        return self.workload.held(problem, variant, variant.round_inputs(*drawn))
