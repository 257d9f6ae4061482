"""Contexts that look on while a model runs: `shadow` compares implementations of attention, `capture` keeps its tensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from numdev.arithmetic.formats import Format, format_of
from numdev.attention.exact import Exact, ExactBackward
from numdev.errors import BadInput, NumdevError, Unsupported, one_of
from numdev.measurement.metrics import Sample, compare
from numdev.results.record import write_atomically
from numdev.results.store import pack
from numdev.training.attend import Arguments, Call, ForwardAlone, Interception, Onward, Variant, callers, trainable
from numdev.training.watch import Beside, Inputs

Kind = TypeVar("Kind", bound="Recorder")

REFERENCE = "reference"
_WHOLE = "model"  # the name of a model that calls attention itself, and of what runs outside of it


class Recorder(Interception):
    """A context that answers calls and knows in which step and in which module of a model each is made.

    Entering it again after a call begins the next step. Leaving it warns as leaving `attend` does.
    """

    _hint = ""  # of the warning

    def __init__(self, model: nn.Module | None, read_masks: bool, dropout: bool = False) -> None:
        super().__init__(read_masks, dropout)
        self._names = {module: name for name, module in model.named_modules()} if model is not None else {}
        self._entered: list[ExitStack] = []
        self._step = self._calls = 0

    def __enter__(self: Kind) -> Kind:
        if self._calls:
            self.step()
        self._entered.append(ExitStack())
        self._entered[-1].enter_context(self.active())
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._entered.pop().close()
        if kind is None:
            self._write()
            self.seen.warn(type(self).__name__, self._hint)

    def step(self, number: int | None = None) -> None:
        """Write what is kept of this step; the calls that follow are of the next one, or of the one that is given."""
        self._write()
        self._step, self._calls = self._step + 1 if number is None else number, 0

    def _write(self) -> None:
        """Write what is kept of a step."""

    def _call(self) -> tuple[int, str]:
        """Number of a call in its step, from 0, and name of the innermost module of the model that makes it, or ''."""
        self._calls += 1
        return self._calls - 1, next((self._names[module] for module in callers(nn.Module) if module in self._names), "")


class shadow(Recorder):  # noqa: N801  # a context that is called as `attend` is
    """A context in which a model runs on `reference` while every variant is computed beside it on the same q, k and v.

    As Golden et al. 2024, section V, have it: "each time attention is called, compute both".
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
        dropout: see `attend`; all are computed with one mask.

    Attributes:
        rows: one for each step, call, output, head, subject and reference, with every metric of `Deviation`.
        seen: see `attend`.
        subjects: what is computed, by name; the reference first.

    Raises:
        BadInput: without variants, and for a variant named `reference`.
    """

    def __init__(
        self,
        variants: Mapping[str, Variant],
        reference: Variant,
        *,
        model: nn.Module | None = None,
        read_masks: bool = False,
        dropout: bool = False,
    ) -> None:
        if not variants:
            raise BadInput("variants", {}, "name at least one, such as {'tiled': TiledBackward(...)}")
        if REFERENCE in variants:
            raise BadInput("variants", REFERENCE, "it is the name of the reference itself; give another")
        super().__init__(model, read_masks, dropout)
        self.rows: list[dict[str, Any]] = []
        self.subjects: dict[str, Any] = {name: trainable(each) for name, each in {REFERENCE: reference, **variants}.items()}

    def save(self, path: Path | str) -> None:
        """Write the rows as Parquet, whole or not at all; raises BadInput where there are none, StoreError where it cannot."""
        if not self.rows:
            raise BadInput("rows", 0, "no call of attention was recorded; run the model within the context")
        write_atomically(Path(path), pack("shadow", self.rows))

    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        call = Call.of(arguments, self._reader)
        number, layer = self._call()
        records = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))

        def leaf(name: str, x: Tensor) -> Tensor:
            if name == REFERENCE:
                return x.detach().requires_grad_(records)
            # FP64 gives a variant's result its own format, and not the model's.
            return x.detach().double().requires_grad_(records and not isinstance(self.subjects[name], ForwardAlone))

        record = partial(self._record, {"step": self._step, "call": number, "layer": layer})
        return call.shaped(Beside(self.subjects, record, (call.mask, call.scale), leaf).out(call.q, call.k, call.v))

    def _record(self, place: dict[str, Any], call: Beside, results: Mapping[str, Inputs], do: Tensor | None) -> Inputs:
        """Those of the reference, in the dtype of the model; and a row for each subject, reference, output and head."""
        wide = tuple(x.detach().double() for x in (*call.leaves[REFERENCE], *(() if do is None else (do,))))
        direction, outputs = ("forward", ("out",)) if do is None else ("backward", ("dq", "dk", "dv"))
        exact: Any = Exact() if do is None else ExactBackward()

        def golden_of(inputs: Inputs) -> list[list[Sample]]:
            tensors = exact(*inputs, *call.how).tensors()
            return _heads(tuple(tensors[output] for output in outputs))

        golden, values = golden_of(wide), {name: _heads(own) for name, own in results.items()}
        for name, own in values.items():
            subject = self.subjects[name]
            rounds = subject.primal if direction == "forward" else subject
            formats: list[Format] = [rounds.formats[output] for output in outputs]
            if name == REFERENCE:  # its results are in the model's dtype: the coarser of the two formats
                model = format_of(call.leaves[name][0].dtype)
                formats = [max(fmt, model, key=lambda one: one.u) for fmt in formats]
            rounded = rounds.round_inputs(*wide)
            same = all(torch.equal(a.double(), b) for a, b in zip(rounded, wide, strict=True))
            against = {"golden": golden, "golden_same_inputs": golden if same else golden_of(rounded)}
            if name != REFERENCE:
                against[REFERENCE] = values[REFERENCE]
            for reference, expected in against.items():
                for output, fmt, samples, others in zip(outputs, formats, own, expected, strict=True):
                    for head, (sample, other) in enumerate(zip(samples, others, strict=True)):
                        where = {"pass": direction, "output": output, "head": head, "subject": name, "reference": reference}
                        self.rows.append(place | where | compare(sample, other, fmt).metrics())
        return results[REFERENCE]


def _heads(results: Inputs) -> list[list[Sample]]:
    """The values of each head of each result, `[batch, heads, tokens, dim]`, over all batch entries."""
    return [[Sample(x[:, head]) for head in range(x.shape[1])] for x in results]


class capture(Recorder):  # noqa: N801  # a context that is called as `attend` is
    """A context in which the inputs of a model's attention are kept: one file `step<number>.safetensors` for each chosen step.

    The model computes what it computes without. A file holds `<layer>.q`, `.k` and `.v`, as attention takes them (after rotary
    embeddings and autocast), `<layer>.do`, the gradient of its output, where a backward pass reached it, and `<layer>.mask`, in
    FP64, what a mask tensor adds to the scores where it is more than a limit or padding behind the keys. Its metadata note
    the mask and the scale of each layer, under which `problem=captured` measures it; a mask on a GPU is read, for which the host
    waits. Within `attend` or `shadow`, enter `capture` last.

        >>> with nd.capture(model, "captured", layers=["blocks.0.attn"], steps=[0, 1000]) as captured:
        ...     for batch in batches:
        ...         train(batch)
        ...         captured.step()

    Args:
        model: whose modules name the layers. A module that calls attention again in a step is another layer, `<name>#1`.
        folder: is made where it does not exist; a file of the same step is replaced, whole or not at all.
        layers: names of modules as `model.named_modules()` has them, or numbers of calls within a step; None is all.
        steps: which to keep, counted from 0; None is all. `step()` begins the next; so does entering again after a call.

    Attributes:
        paths: of the files written, by step.
        seen: what became of the calls; every one that went on to the attention it was meant for counts.

    Raises:
        BadInput: for a layer that the model does not have, or that called no attention in a step; at the end of that step.
        StoreError: where a file cannot be written.
    """

    _hint = "; enter capture after attend or shadow"

    def __init__(
        self,
        model: nn.Module,
        folder: Path | str,
        *,
        layers: Collection[str | int] | None = None,
        steps: Collection[int] | None = None,
    ) -> None:
        super().__init__(model, read_masks=True)
        self.paths: dict[int, Path] = {}
        self._folder, self._chosen, self._layers = Path(folder), steps, None if layers is None else set(layers)
        modules = [name for name in self._names.values() if name]
        for layer in self._layers or ():
            if isinstance(layer, str) and layer.split("#")[0] not in (*modules, _WHOLE):
                raise BadInput("layers", layer, one_of(layer, modules))
        self._tensors, self._notes, self._called = dict[str, Tensor](), dict[str, dict[str, Any]](), dict[str, int]()

    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        number, module = self._call()
        if self._chosen is not None and self._step not in self._chosen:
            return onward(arguments)
        name = module or _WHOLE
        before = self._called[name] = self._called.get(name, -1) + 1
        layer = f"{name}#{before}" if before else name
        if self._layers is not None and not {layer, number} & self._layers:
            return onward(arguments)
        cast = arguments.cast()
        q, k, v = cast.query, cast.key, cast.value
        mask: dict[str, Any] | str
        try:
            call = Call.of(replace(cast, dropout_p=0.0), self._reader)
            q, k, v, bias = call.q, call.k, call.v, call.mask.bias
            mask = {name: value for name, value in vars(call.mask).items() if name not in ("bias", "dropout")}
            if bias is not None:
                self._tensors[f"{layer}.mask"] = bias.values
        except NumdevError as error:  # the reason why no `Mask` states it
            mask = str(error)
        self._tensors |= {f"{layer}.{letter}": _kept(x) for letter, x in (("q", q), ("k", k), ("v", v))}
        self._notes[layer] = {"call": number, "scale": arguments.scale, "mask": mask}
        out = onward(arguments)
        if out.requires_grad:
            out.register_hook(lambda do, tensors=self._tensors: tensors.__setitem__(f"{layer}.do", _kept(do)))
        return out

    def _write(self) -> None:
        """The file of this step, and nothing is kept of it any more."""
        tensors, notes, called = self._tensors, self._notes, self._called
        self._tensors, self._notes, self._called = {}, {}, {}
        known = {*notes, *(note["call"] for note in notes.values())}
        if called and (missing := [layer for layer in self._layers or () if layer not in known]):
            raise BadInput("layers", missing[0], f"it called no attention in step {self._step}; {', '.join(called)} did")
        if tensors:
            texts = {"step": str(self._step)} | {layer: json.dumps(note) for layer, note in notes.items()}
            from safetensors.torch import save  # late: this module is imported with the package

            path = self._folder / f"step{self._step:06d}.safetensors"
            write_atomically(path, save({name: tensor.cpu() for name, tensor in tensors.items()}, texts))
            self.paths[self._step] = path


def _kept(x: Tensor) -> Tensor:
    """A copy, whatever becomes of the tensor, in the shape that files have."""
    if x.is_nested:
        raise Unsupported("query", "it is a nested tensor, which no file of captured tensors holds; pad the sequences")
    x = x.detach()[(None,) * (3 - x.ndim)]
    return (x if x.ndim <= 4 else x.flatten(0, -4)).clone().contiguous()
