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

from numdev.arithmetic.formats import BF16, FP16, FP32, FP64, Format
from numdev.attention.exact import Exact, ExactBackward
from numdev.errors import BadInput
from numdev.measurement.deviation.metrics import compare
from numdev.measurement.deviation.sample import Sample
from numdev.results.files import write_atomically
from numdev.results.store import pack
from numdev.training.attend import ForwardAlone, Onward, Recorder, Variant, trainable
from numdev.training.call import Arguments, Call

Heads = Mapping[str, list[Sample]]
Inputs = tuple[Tensor, ...]

REFERENCE = "reference"
_GRADIENTS = ("dq", "dk", "dv")
_MODEL = {fmt.dtype: fmt for fmt in (FP64, FP32, FP16, BF16)}


class shadow(Recorder):  # noqa: N801  # a context that is called as `attend` is
    """A context in which a model runs on `reference` while every variant is computed beside it on the same q, k and v.

    In the backward pass the same dO is given to every variant. Each result is compared, head by head, with golden (exact in FP64,
    of the q, k, v and dO that the model has: total error), with golden of the inputs as the subject rounds them (arithmetic
    error), and with the reference. A variant of the forward pass alone is compared forward alone.

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

    Attributes:
        rows: one for each step, call, output, head, subject and reference, with every metric of `Deviation`.
        seen: see `attend`.
        subjects: what is computed, by name; the reference first.

    Raises:
        BadInput: without variants, and for a variant named `reference`.
    """

    def __init__(
        self, variants: Mapping[str, Variant], reference: Variant, *, model: nn.Module | None = None, read_masks: bool = False
    ) -> None:
        if not variants:
            raise BadInput("variants", {}, "name at least one, such as {'tiled': TiledBackward(...)}")
        if REFERENCE in variants:
            raise BadInput("variants", REFERENCE, "it is the name of the reference itself; give another")
        super().__init__(model, read_masks)
        self.rows: list[dict[str, Any]] = []
        self.subjects: dict[str, Any] = {name: trainable(each) for name, each in {REFERENCE: reference, **variants}.items()}

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

    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        """See `numdev.training.attend.Interception`."""
        call = Call.of(arguments, self._reader)
        number, layer = self._call()
        beside = _Beside(self, call, {"step": self._step, "call": number, "layer": layer})
        result: Tensor = _Shadowed.apply(call.q, call.k, call.v, beside)  # type: ignore[no-untyped-call]
        return call.shaped(result)


class _Beside:
    """One call: the reference's result for the model, and the variants' beside it."""

    def __init__(self, log: shadow, call: Call, place: dict[str, Any]) -> None:
        self._log, self._how, self._place = log, (call.mask, call.scale), place
        self._records = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
        self._leaves: dict[str, Inputs] = {}
        self._outs: dict[str, Tensor] = {}

    def forward(self, inputs: Inputs) -> Tensor:
        """O of the reference, in the dtype of the model."""
        wide = tuple(x.detach().double() for x in inputs)  # gives a variant's result its own format, and not the model's
        for name, subject in self._log.subjects.items():
            records = self._records and (name == REFERENCE or not isinstance(subject, ForwardAlone))
            leaves = tuple(x.detach().requires_grad_(records) for x in (inputs if name == REFERENCE else wide))
            with torch.set_grad_enabled(records):
                self._outs[name] = subject.attend(*leaves, *self._how)
            self._leaves[name] = leaves
        self._record("forward", {name: {"out": out.detach()} for name, out in self._outs.items()}, wide)
        return self._outs[REFERENCE].detach()

    def backward(self, do: Tensor) -> Inputs:
        """The gradients of the reference, in the dtype of the model."""
        results = {}
        for name, out in self._outs.items():
            if out.requires_grad:
                gradients = torch.autograd.grad(out, self._leaves[name], do.to(out.dtype), retain_graph=True)
                results[name] = dict(zip(_GRADIENTS, gradients, strict=True))
        wide = tuple(x.detach().double() for x in (*self._leaves[REFERENCE], do))
        self._record("backward", results, wide)
        return tuple(results[REFERENCE].values())

    def _record(self, direction: str, results: dict[str, dict[str, Tensor]], wide: Inputs) -> None:
        """A row for each subject, reference, output and head; `wide` are the inputs in FP64."""
        golden, values = self._golden(wide), {name: _heads(outputs) for name, outputs in results.items()}
        for name, outputs in values.items():
            subject = self._log.subjects[name]
            rounds = subject.primal if direction == "forward" else subject
            formats: dict[str, Format] = {output: rounds.formats[output] for output in outputs}
            if name == REFERENCE:  # its results are in the model's dtype: the coarser of the two formats
                model = _MODEL[self._leaves[name][0].dtype]
                formats = {output: max(fmt, model, key=lambda one: one.u) for output, fmt in formats.items()}
            rounded = rounds.round_inputs(*wide)
            same = all(torch.equal(a.double(), b) for a, b in zip(rounded, wide, strict=True))
            against = {"golden": golden, "golden_same_inputs": golden if same else self._golden(rounded)}
            if name != REFERENCE:
                against[REFERENCE] = values[REFERENCE]
            for reference, expected in against.items():
                for output, samples in outputs.items():
                    for head, (sample, other) in enumerate(zip(samples, expected[output], strict=True)):
                        place = {"pass": direction, "output": output, "head": head, "subject": name, "reference": reference}
                        self._log.rows.append(self._place | place | compare(sample, other, formats[output]).metrics())

    def _golden(self, inputs: Inputs) -> Heads:
        """Exact O of q, k and v; with dO as well, the exact gradients."""
        mask, scale = self._how
        if len(inputs) == 3:
            return _heads({"out": Exact()(*inputs, mask, scale).out})
        q, k, v, do = inputs
        gradients = ExactBackward()(q, k, v, do, mask, scale)
        return _heads({name: getattr(gradients, name) for name in _GRADIENTS})


def _heads(results: Mapping[str, Tensor]) -> Heads:
    """The values of each head of each result, `[batch, heads, tokens, dim]`, over all batch entries."""
    return {name: [Sample(x[:, head]) for head in range(x.shape[1])] for name, x in results.items()}


class _Shadowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, beside: _Beside) -> Tensor:
        ctx.beside = beside
        return beside.forward((q, k, v))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.beside.backward(do), None
