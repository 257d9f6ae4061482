"""q, k, v and dO of chosen calls of attention and chosen steps, kept in files that `problem=captured` reads."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from numdev.errors import BadInput, NumdevError, Unsupported, one_of
from numdev.results.files import write_atomically
from numdev.training.call import Arguments, Call, MaskReader
from numdev.training.interception import Onward, Recorder


def capture(
    model: nn.Module,
    folder: Path | str,
    *,
    layers: Collection[str | int] | None = None,
    steps: Collection[int] | None = None,
) -> Capture:
    """A context in which the inputs of a model's attention are kept: one file `step<number>.safetensors` for each chosen step.

    The model computes what it computes without. A file holds `<layer>.q`, `.k` and `.v`, as attention takes them (after rotary
    embeddings and autocast), and `<layer>.do`, the gradient of its output, where a backward pass reached it. Its metadata note
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

    Raises:
        BadInput: for a layer that the model does not have, or that called no attention in a step; at the end of that step.
        StoreError: where a file cannot be written.
    """
    return Capture(model, Path(folder), layers, steps)


class Capture(Recorder):
    """The context of `capture`.

    Attributes:
        paths: of the files written, by step.
        seen: what became of the calls of attention; every one that went on to the attention it was meant for counts.
    """

    def __init__(
        self, model: nn.Module, folder: Path, layers: Collection[str | int] | None, steps: Collection[int] | None
    ) -> None:
        """See `capture`."""
        super().__init__(model)
        self.paths: dict[int, Path] = {}
        self._folder, self._chosen = folder, steps
        self._layers = None if layers is None else set(layers)
        modules = dict(model.named_modules())
        for layer in self._layers or ():
            if isinstance(layer, str) and layer.split("#")[0] not in modules and layer != _WHOLE:
                raise BadInput("layers", layer, one_of(layer, [name for name in modules if name]))
        self._tensors: dict[str, Tensor] = {}
        self._notes: dict[str, str] = {}
        self._called: dict[str, int] = {}
        self._reader = MaskReader(waits=True)

    def __enter__(self) -> Capture:
        if self._tensors:
            self._write()
        self._enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        super().__exit__(kind, *error)
        if kind is None:
            self._write()
            self.seen.warn("capture", "; enter capture after attend or shadow")

    def step(self, number: int | None = None) -> None:
        """Write what was kept of this step; the calls that follow are of the next one, or of the one that is given."""
        self._write()
        super().step(number)

    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        """See `numdev.training.interception.Answer`."""
        number = self._steps.call()
        if self._chosen is not None and self._steps.number not in self._chosen:
            return onward(arguments)
        layer = self._name()
        if self._layers is not None and not {layer, number} & self._layers:
            return onward(arguments)
        arguments = arguments.cast()
        q, k, v, mask = self._masked(arguments)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            self._tensors[f"{layer}.{name}"] = _kept(tensor)
        self._notes[layer] = json.dumps({"call": number, "scale": arguments.scale, "mask": mask})
        out = onward(arguments)
        if out.requires_grad:
            out.register_hook(lambda do, tensors=self._tensors: tensors.__setitem__(f"{layer}.do", _kept(do)))
        return out

    def _masked(self, arguments: Arguments) -> tuple[Tensor, Tensor, Tensor, dict[str, Any] | str]:
        """q, k and v with their mask as the fields of a `Mask`, or as the reason why no `Mask` states it."""
        try:
            call = Call.of(replace(arguments, dropout_p=0.0), self._reader)
        except NumdevError as error:
            return arguments.query, arguments.key, arguments.value, str(error)
        return call.q, call.k, call.v, asdict(call.mask)

    def _name(self) -> str:
        """That of the module that calls, and how many calls it made in this step before."""
        name = self._running.name or _WHOLE
        before = self._called.get(name, 0)
        self._called[name] = before + 1
        return f"{name}#{before}" if before else name

    def _write(self) -> None:
        """The file of this step, and nothing is kept of it any more."""
        number, tensors, notes, called = self._steps.number, self._tensors, self._notes, self._called
        self._tensors, self._notes, self._called = {}, {}, {}
        if called:
            self._check(called, notes)
        if not tensors:
            return
        from safetensors.torch import save  # late: only what writes a file needs it

        path = self._folder / f"step{number:06d}.safetensors"
        data = save({name: tensor.cpu() for name, tensor in tensors.items()}, {"step": str(number)} | notes)
        write_atomically(path, data)
        self.paths[number] = path

    def _check(self, called: dict[str, int], notes: dict[str, str]) -> None:
        """Raise BadInput where a chosen layer made no call."""
        numbers = {json.loads(note)["call"] for note in notes.values()}
        for layer in self._layers or ():
            if layer not in notes and layer not in numbers:
                others = ", ".join(called)
                raise BadInput("layers", layer, f"it called no attention in step {self._steps.number}; {others} did")


_WHOLE = "model"  # the name of a model that calls attention itself, and of what runs outside of it


def _kept(x: Tensor) -> Tensor:
    """A copy, whatever becomes of the tensor, in the shape that files have."""
    if x.is_nested:
        raise Unsupported("query", "it is a nested tensor, which no file of captured tensors holds; pad the sequences")
    x = x.detach()
    while x.ndim < 3:
        x = x.unsqueeze(0)
    return (x if x.ndim <= 4 else x.flatten(0, -4)).clone().contiguous()
