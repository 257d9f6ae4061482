"""What a measurement must know of an operation: its inputs, outputs, steps and golden, as the operation declares them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.arithmetic.rounding import Cast
from numdev.errors import Unsupported
from numdev.measurement.workload import Workload
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
class Together(Protocol):
    """An implementation that computes several replicates faster than one by one.

    To declare it is a promise: outputs, counters and kernel of each replicate are those of a call of its own, to the bit. It is
    the promise of the class whose `__call__` it stands beside; a subclass with another `__call__` makes its own or none.
    """

    def together(self, replicates: Sequence[tuple[Tensor, ...]], **arguments: Any) -> Sequence[Outputs]:
        """The outputs of each replicate, in their order, given the rounded inputs of each."""
        ...


def outputs_of(
    subjects: Sequence[Measurable], replicates: Sequence[tuple[Tensor, ...]], arguments: dict[str, Any]
) -> Sequence[Outputs]:
    """The outputs of each replicate by its own subject; together where all have one subject that can."""
    first = subjects[0]
    if isinstance(first, Together) and _promises(first) and all(subject is first for subject in subjects):
        return first.together(replicates, **arguments)
    return [subject(*inputs, **arguments) for subject, inputs in zip(subjects, replicates, strict=True)]


def _promises(subject: Together) -> bool:
    owner = next(kind for kind in type(subject).__mro__ if "__call__" in vars(kind))
    return "together" in vars(owner)


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


Draw = Callable[[Any, int, torch.device], Mapping[str, Tensor]]  # problem, seed, device to tensors by name


def from_problem(problem: Any, seed: int, device: torch.device) -> Mapping[str, Tensor]:
    """What the problem itself draws: `problem.inputs(seed, device)`."""
    drawn: Mapping[str, Tensor] = problem.inputs(seed, device)
    return drawn


@dataclass(frozen=True)
class Inputs:
    """Inputs that one rule draws together.

    Attributes:
        names: names of the inputs, in the order in which an implementation takes them.
        draw: the rule; the same problem and seed give the same numbers in FP64 on every device.
    """

    names: tuple[str, ...]
    draw: Draw = from_problem


@dataclass(frozen=True)
class Output:
    """One of the named results.

    Attributes:
        name: by which an implementation returns it and states its format.
        meaning: one sentence.
        directed: whether it is a matrix `[..., tokens, dim]` for each head of which the rank and the direction of the error are
            recorded too.
    """

    name: str
    meaning: str
    directed: bool = False


def _nothing(device: torch.device) -> dict[str, str]:
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

    Attributes:
        name: name of the operation, as records state it.
        golden: the exact implementation; None if there is none, as for training, whose runs are compared with one another.
        inputs: named inputs, with the rules that draw them.
        outputs: named outputs, the primary one first; a variant gives each a format of its own.
        steps: the names of the steps of its precision policy, in the order of execution.
        counters: events that a run may count: the columns of the table `counters`.
        settings: what the settings of its problems and variants mean, as columns `problem.<setting>` and `variant.<setting>`; a
            study's manifest keeps them for its readers.
        environment: facts beyond those of torch and the processor that may change a result on a device.
        workload: what a measurement of speed must know of the operation.
        smaller: what to use if memory does not suffice; completes the sentence "use ...".
    """

    name: str
    golden: Measurable | None
    inputs: tuple[Inputs, ...]
    outputs: tuple[Output, ...]
    steps: tuple[str, ...] = ()
    counters: tuple[Column, ...] = ()
    settings: Callable[[], tuple[Column, ...]] = tuple
    environment: Callable[[torch.device], dict[str, str]] = _nothing
    workload: Workload = field(default_factory=Workload)
    smaller: str = "a smaller problem"

    @property
    def exact(self) -> Measurable:
        """`golden`.

        Raises:
            Unsupported: where there is none.
        """
        if self.golden is None:
            raise Unsupported("operation", f"{self.name} has no exact result from which a deviation could be measured")
        return self.golden

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
            found = inputs.draw(problem, seed, device)
            drawn += (found[name] for name in inputs.names)
        return tuple(drawn)
