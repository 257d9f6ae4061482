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
from numdev.training.attend import Onward, Recorder
from numdev.training.call import Arguments, Call

_WHOLE = "model"  # the name of a model that calls attention itself, and of what runs outside of it


class capture(Recorder):  # noqa: N801  # a context that is called as `attend` is
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
        self._forget()

    def _forget(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._notes: dict[str, dict[str, Any]] = {}
        self._called: dict[str, int] = {}

    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        """See `numdev.training.attend.Interception`."""
        number, module = self._call()
        if self._chosen is not None and self._step not in self._chosen:
            return onward(arguments)
        name = module or _WHOLE
        before = self._called[name] = self._called.get(name, -1) + 1
        layer = f"{name}#{before}" if before else name
        if self._layers is not None and not {layer, number} & self._layers:
            return onward(arguments)
        arguments = arguments.cast()
        q, k, v = arguments.query, arguments.key, arguments.value
        mask: dict[str, Any] | str
        try:
            call = Call.of(replace(arguments, dropout_p=0.0), self._reader)
            q, k, v, mask = call.q, call.k, call.v, asdict(call.mask)
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
        self._forget()
        known = {*notes, *(note["call"] for note in notes.values())}
        if called and (missing := [layer for layer in self._layers or () if layer not in known]):
            raise BadInput("layers", missing[0], f"it called no attention in step {self._step}; {', '.join(called)} did")
        if tensors:
            texts = {"step": str(self._step)} | {layer: json.dumps(note) for layer, note in notes.items()}
            path = self._folder / f"step{self._step:06d}.safetensors"
            from safetensors.torch import save  # late: this module is imported with the package

            write_atomically(path, save({name: tensor.cpu() for name, tensor in tensors.items()}, texts))
            self.paths[self._step] = path


def _kept(x: Tensor) -> Tensor:
    """A copy, whatever becomes of the tensor, in the shape that files have."""
    if x.is_nested:
        raise Unsupported("query", "it is a nested tensor, which no file of captured tensors holds; pad the sequences")
    x = x.detach()
    while x.ndim < 3:
        x = x.unsqueeze(0)
    return (x if x.ndim <= 4 else x.flatten(0, -4)).clone().contiguous()
