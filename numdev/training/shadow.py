"""Several implementations of attention computed beside the one that a model runs on, from the same q, k, v and dO.

Golden et al. 2024, section V: "each time attention is called, compute both".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from numdev.errors import BadInput
from numdev.results.files import write_atomically
from numdev.results.store import pack
from numdev.training.attend import ForwardAlone, Variant, trainable
from numdev.training.call import Asked, Call
from numdev.training.comparison import Golden, Inputs, Subject, heads, held_in
from numdev.training.interception import Interception, Onward, Seen
from numdev.training.masks import MaskReader
from numdev.training.steps import Running, Steps

REFERENCE = "reference"
GRADIENTS = ("dq", "dk", "dv")


def shadow(
    variants: Mapping[str, Variant], reference: Variant, *, model: nn.Module | None = None, read_masks: bool = False
) -> Shadow:
    """A context in which a model runs on `reference` while every variant is computed beside it on the same q, k and v.

    In the backward pass the same dO is given to every variant. Each result is compared, head by head, with golden (exact in FP64,
    of the q, k, v and dO that the model has: total error), with golden of the inputs as the subject rounds them (arithmetic
    error), and with the reference: `Shadow.rows`. A variant of the forward pass alone is compared forward alone.

        >>> with nd.shadow({"tiled": variant}, reference) as log:
        ...     for batch in batches:
        ...         model(batch).sum().backward()
        ...         log.step()
        >>> nd.plot(log.rows, x="step", y="rmse")

    It is no way to train fast: every call costs an exact attention in FP64, and sorting the values of each head.

    Args:
        variants: by the name that rows give them.
        reference: what the model runs on, forward and backward, as `attend` does.
        model: names the `layer` of each call; without it that column is empty.
        read_masks: see `attend`.

    Raises:
        BadInput: without variants, and for a variant named `reference`.
    """
    return Shadow(variants, reference, model, read_masks)


class Shadow:
    """What `shadow` records. Entering it again begins the next step.

    Attributes:
        rows: one for each step, call, output, head, subject and reference, with every metric of `Deviation`.
        seen: see `attend`.
        subjects: what is computed, by name; the reference first.
    """

    def __init__(
        self, variants: Mapping[str, Variant], reference: Variant, model: nn.Module | None = None, read_masks: bool = False
    ) -> None:
        """See `shadow`."""
        if not variants:
            raise BadInput("variants", {}, "name at least one, such as {'tiled': TiledBackward(...)}")
        if REFERENCE in variants:
            raise BadInput("variants", REFERENCE, "it is the name of the reference itself; give another")
        self.rows: list[dict[str, Any]] = []
        self.seen = Seen()
        self.subjects = {name: trainable(subject) for name, subject in ({REFERENCE: reference} | dict(variants)).items()}
        self._reader = MaskReader(read_masks)
        self._steps, self._running = Steps(), Running(model)
        self._interception = Interception(self, self.seen)

    def __enter__(self) -> Shadow:
        self._steps.enter()
        self._running.__enter__()
        self._interception.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._interception.__exit__(kind, *error)
        self._running.__exit__(kind, *error)
        if kind is None:
            self.seen.warn("shadow")

    def step(self, number: int | None = None) -> None:
        """The calls that follow are of the next step, or of the one that is given."""
        self._steps.step(number)

    def save(self, path: Path | str) -> None:
        """Write the rows as Parquet, whole or not at all.

        Raises:
            BadInput: for a name that does not end in .parquet, and where there are no rows.
            StoreError: where the file cannot be written.
        """
        if Path(path).suffix != ".parquet":
            raise BadInput("path", str(path), "rows are written as Parquet; give a name that ends in .parquet")
        if not self.rows:
            raise BadInput("rows", 0, "no call of attention was recorded; run the model within the context")
        write_atomically(Path(path), pack("shadow", self.rows))

    def answer(self, asked: Asked, onward: Onward) -> Tensor:
        """See `numdev.training.interception.Answer`."""
        call = Call.of(asked, self._reader)
        place = {"step": self._steps.number, "call": self._steps.call(), "layer": self._running.name}
        records = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
        beside = _Beside(self, call, place, records)
        result: Tensor = _Shadowed.apply(call.q, call.k, call.v, beside)  # type: ignore[no-untyped-call]
        return call.shaped(result)


class _Beside:
    """One call: the reference's result for the model, and the variants' beside it."""

    def __init__(self, log: Shadow, call: Call, place: dict[str, Any], records: bool) -> None:
        self._log, self._call, self._place, self._records = log, call, place, records
        self._leaves: dict[str, Inputs] = {}
        self._outs: dict[str, Tensor] = {}

    def forward(self, inputs: Inputs) -> Tensor:
        """O of the reference, in the dtype of the model."""
        wide = tuple(x.detach().double() for x in inputs)  # gives a variant's result its own format, and not the model's
        for name in self._log.subjects:
            self._run(name, inputs if name == REFERENCE else wide)
        self._record("forward", {name: {"out": out.detach()} for name, out in self._outs.items()}, wide)
        return self._outs[REFERENCE].detach()

    def backward(self, do: Tensor) -> Inputs:
        """The gradients of the reference, in the dtype of the model."""
        found = {}
        for name, out in self._outs.items():
            if out.requires_grad:
                gradients = torch.autograd.grad(out, self._leaves[name], do.to(out.dtype), retain_graph=True)
                found[name] = dict(zip(GRADIENTS, gradients, strict=True))
        wide = tuple(x.detach().double() for x in (*self._leaves[REFERENCE], do))
        self._record("backward", found, wide)
        return tuple(found[REFERENCE].values())

    def _run(self, name: str, inputs: Inputs) -> None:
        subject, call = self._log.subjects[name], self._call
        records = self._records and (name == REFERENCE or not isinstance(subject, ForwardAlone))
        q, k, v = leaves = tuple(x.detach().requires_grad_(records) for x in inputs)
        with torch.set_grad_enabled(records):
            self._outs[name] = subject.attend(q, k, v, call.mask, call.scale)
        self._leaves[name] = leaves

    def _record(self, direction: str, found: dict[str, dict[str, Tensor]], wide: Inputs) -> None:
        """Every comparison of the results that were found, of the inputs in FP64."""
        golden = Golden(wide, self._call.mask, self._call.scale)
        values, place = {name: heads(results) for name, results in found.items()}, self._place | {"pass": direction}
        for name, results in values.items():
            subject = self._log.subjects[name]
            rounds: Any = subject.primal if len(wide) == 3 else subject
            formats = {output: rounds.formats[output] for output in results}
            if name == REFERENCE:
                formats = held_in(formats, self._leaves[name][0].dtype)
            against = {"golden": golden.unrounded, "golden_same_inputs": golden.of(rounds.round_inputs(*wide))}
            if name != REFERENCE:
                against[REFERENCE] = values[REFERENCE]
            self._log.rows.extend(place | row for row in Subject(name, results, formats).rows(against))


class _Shadowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, beside: _Beside) -> Tensor:
        ctx.beside = beside
        return beside.forward((q, k, v))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.beside.backward(do), None
