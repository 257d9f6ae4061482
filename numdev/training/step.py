"""One step of training, called operation by operation or replayed as a CUDA graph."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from numdev.errors import Unsupported
from numdev.training.attend import CallCounts
from numdev.training.run import Run
from numdev.training.rung import Numerics
from numdev.training.state import State
from numdev.training.task import Batch
from numdev.training.watch import Watch

_WARM_UPS = 3  # steps before a capture: allocator, cuBLAS and Triton have done then what they do once


class Step:
    """Steps of a run, one operation after the other until `capture` is called.

    Attributes:
        captured: whether steps are replays of a CUDA graph.
        calls, missed: of attention in the last step, as `CallCounts` counts them.
    """

    def __init__(self, run: Run, state: State, device: torch.device, seen: CallCounts, watch: Watch | None = None) -> None:
        self._run, self._state, self._device, self._seen, self._watch = run, state, device, seen, watch
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch = {}
        self._outputs: tuple[Tensor, Tensor]
        self.calls = self.missed = 0

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, step: int, batch: Batch) -> None:
        """Do step `step` and note its loss and norm."""
        state = self._state
        state.rate.fill_(self._run.task.rate_at(step))
        if self._graph is None:
            self._outputs = self.update({name: x.to(self._device) for name, x in batch.items()})
        else:
            for name, x in batch.items():
                self._inputs[name].copy_(x)
            self._graph.replay()
        state.losses[step], state.norms[step] = self._outputs
        if self._watch is not None:
            state.watched[step] = self._watch.row

    def update(self, batch: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Loss and norm of the gradients of a step, without any wait for the device.

        Loss under the rung's numerics, gradients, their mean over the ranks, their clipping to a norm, AdamW.
        """
        state, task, scale = self._state, self._run.task, self._state.scale
        calls, missed = self._seen.calls, self._seen.missed
        if self._watch is not None:
            self._watch.begin()
        for x in state.parameters.values():
            x.grad = None
        with self._casting():
            loss = task.loss(state.model, batch).float()
        (loss if scale is None else loss * scale.scale).backward()
        self.calls, self.missed = self._seen.calls - calls, self._seen.missed - missed
        if self._watch is not None:
            self._watch.end()
        with torch.no_grad():
            gradients, loss = list(state.gradients().values()), loss.detach()
            if scale is not None:
                torch._foreach_mul_(gradients, scale.scale.reciprocal())
            if self._run.rung.ranks > 1:
                loss = _average(gradients, loss)
            norm = get_total_norm([x.float() for x in gradients])
            if task.clip > 0:
                clip_grads_with_norm_(state.parameters.values(), task.clip, norm)
            if scale is not None:
                scale.update(norm)
            state.optimizer.step()
        return loss, norm

    def _casting(self) -> AbstractContextManager[object]:
        """The context in which the model is called."""
        numerics = self._run.rung.numerics
        if numerics is Numerics.FP32:
            return nullcontext()
        return torch.autocast(self._device.type, torch.float16 if numerics is Numerics.FP16 else torch.bfloat16)

    def capture(self, batch: Batch) -> str:
        """Have steps replay one CUDA graph, whose inputs are copied into the same memory; or return why it cannot be.

        A step of the text-to-image model of 10 million parameters on an H200 takes 16.4 ms so, and 79 ms without: it is bound by
        launches (`python -m benchmarks.training`). `batch` has the shapes of all batches; its values leave nothing behind.
        """
        if self._run.rung.ranks > 1:
            return "a step of several ranks is not captured"
        state, device = self._state, self._device
        before = {name: x.clone() for name, x in state.tensors().items()}
        self._inputs = {name: x.to(device) for name, x in batch.items()}
        try:
            side, main, graph = torch.cuda.Stream(device), torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self.update(self._inputs)
            main.wait_stream(side)
            state.restore(before)
            for x in state.parameters.values():
                x.grad = None  # the graph's own memory holds them from now on
            torch.cuda.synchronize(device)
            with torch.cuda.graph(graph):
                self._outputs = self.update(self._inputs)
        except (RuntimeError, Unsupported) as error:
            torch.cuda.synchronize()
            state.restore(before)
            return f"the step cannot be captured: {str(error).strip().splitlines()[0]}"
        self._graph = graph
        return ""


def _average(gradients: list[Tensor], loss: Tensor) -> Tensor:
    """The mean of the loss over the processes, and of the gradients in place: by one all-reduce in FP32, with the same bits."""
    parts = [*gradients, loss]
    flat = torch.cat([x.reshape(-1).float() for x in parts])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for x, mean in zip(gradients, flat.split([x.numel() for x in parts]), strict=False):
        x.copy_(mean.view_as(x))
    return flat[-1]
