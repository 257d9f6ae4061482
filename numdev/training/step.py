"""One step of training, called operation by operation or replayed as a CUDA graph."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from numdev.errors import Unsupported
from numdev.training.execution import Graphs
from numdev.training.interception import Seen
from numdev.training.run import Run
from numdev.training.state import State
from numdev.training.task import Batch, rate_at
from numdev.training.watch import FIGURES, Watch
from numdev.training.world import World

_WARM_UPS = 3  # steps before a capture: allocator, cuBLAS and Triton have done then what they do once


class History:
    """The loss of each step, and the norm of its gradients before clipping, on the device: nothing waits to read one.

    A norm that is not finite under a scaled loss is a step that the optimizer skipped. With a watch, its figures too.
    """

    def __init__(self, steps: int, device: torch.device, watch: Watch | None = None) -> None:
        self.losses = torch.zeros(steps, device=device)
        self.norms = torch.zeros(steps, device=device)
        self.watch = watch
        self.watched = torch.zeros(steps if watch else 0, len(FIGURES), dtype=torch.float64, device=device)

    def note(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """What a step found."""
        self.losses[step].copy_(loss)
        self.norms[step].copy_(norm)
        if self.watch is not None:
            self.watched[step].copy_(self.watch.row)

    def tensors(self, done: int) -> dict[str, Tensor]:
        return {"losses": self.losses[:done], "norms": self.norms[:done], "watched": self.watched[:done]}

    def restore(self, saved: dict[str, Tensor]) -> None:
        for name, x in self.tensors(len(saved["losses"])).items():
            x.copy_(saved[name])


class Update:
    """The arithmetic of a step, without any wait for the device.

    Loss under the rung's numerics, gradients, their mean over the ranks, their clipping to a norm, AdamW.

    Attributes:
        calls, missed: of attention in the last step, as `Seen` counts them.
    """

    def __init__(
        self, run: Run, state: State, device: torch.device, world: World, seen: Seen, watch: Watch | None = None
    ) -> None:
        self._run, self._state, self._device, self._world, self._seen = run, state, device, world, seen
        self._watch = watch
        self.calls = self.missed = 0

    def __call__(self, batch: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Do it; returns loss and norm of the gradients."""
        state, task, scale, seen = self._state, self._run.task, self._state.scale, self._seen
        calls, missed = seen.calls, seen.missed
        if self._watch is not None:
            self._watch.begin()
        for x in state.parameters.values():
            x.grad = None
        with self._run.rung.numerics.casting(self._device):
            loss = task.loss(state.model, batch).float()
        (loss if scale is None else loss * scale.scale).backward()
        self.calls, self.missed = seen.calls - calls, seen.missed - missed
        if self._watch is not None:
            self._watch.end()
        with torch.no_grad():
            gradients = list(state.gradients().values())
            if scale is not None:
                scale.unscale(gradients)
            loss = self._world.average(gradients, loss.detach())
            norm = get_total_norm([x.float() for x in gradients])
            if task.clip > 0:
                clip_grads_with_norm_(state.parameters.values(), task.clip, norm)
            state.whole = False
            if scale is not None:
                scale.update(norm)
            state.optimizer.step()
        return loss, norm


class Steps:
    """What steps of both kinds say."""

    captured: bool
    _update: Update

    @property
    def calls(self) -> int:
        """Of attention in one step."""
        return self._update.calls

    @property
    def missed(self) -> int:
        """Of attention in one step, by another than the rung's."""
        return self._update.missed


class Eager(Steps):
    """Steps, one operation after the other."""

    captured = False

    def __init__(
        self, run: Run, state: State, device: torch.device, world: World, seen: Seen, watch: Watch | None = None
    ) -> None:
        self._update, self._state, self._task = Update(run, state, device, world, seen, watch), state, run.task
        self._device = device

    def __call__(self, step: int, batch: Batch, history: History) -> None:
        """Do step `step` and note its loss and norm."""
        self._state.rate.fill_(rate_at(self._task, step))
        loss, norm = self._update({name: x.to(self._device, non_blocking=True) for name, x in batch.items()})
        history.note(step, loss, norm)


class Captured(Steps):
    """Steps as replays of one CUDA graph, whose inputs are copied into the same memory each time.

    Args:
        run: what is trained.
        state: what the graph reads and changes from now on.
        device: a CUDA device.
        batch: of the shapes that all batches have; its values leave nothing behind.
        seen: counts calls of attention.
        watch: of attention, whose figures the graph makes too.
    """

    captured = True

    def __init__(
        self, run: Run, state: State, device: torch.device, batch: Batch, seen: Seen, watch: Watch | None = None
    ) -> None:
        self._state, self._task = state, run.task
        self._inputs = {name: x.to(device) for name, x in batch.items()}
        self._update, before = (
            Update(run, state, device, World(), seen, watch),
            {name: x.clone() for name, x in state.tensors().items()},
        )
        side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._update(self._inputs)
        main.wait_stream(side)
        state.restore(before)
        for x in state.parameters.values():
            x.grad = None  # the graph's own memory holds them from now on
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that makes batches may allocate pinned memory meanwhile
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss, self._norm = self._update(self._inputs)

    def __call__(self, step: int, batch: Batch, history: History) -> None:
        """Do step `step` and note its loss and norm."""
        self._state.rate.fill_(rate_at(self._task, step))
        for name, x in batch.items():
            self._inputs[name].copy_(x, non_blocking=True)
        self._state.whole = False
        self._graph.replay()
        history.note(step, self._loss, self._norm)


def step_of(
    run: Run,
    state: State,
    device: torch.device,
    world: World,
    graphs: Graphs,
    batch: Batch,
    seen: Seen,
    watch: Watch | None = None,
) -> tuple[Eager | Captured, str]:
    """A step as asked for, and why it is not captured where it could have been.

    Raises:
        Unsupported: where `graphs` is on and the step cannot be captured.
    """
    why = ""
    if graphs is Graphs.OFF:
        return Eager(run, state, device, world, seen, watch), why
    if device.type != "cuda":
        why = "CUDA graphs need a CUDA device"
    elif world.size > 1:
        why = "a step of several ranks is not captured"
    else:
        before = {name: x.clone() for name, x in state.tensors().items()}
        try:
            return Captured(run, state, device, batch, seen, watch), why
        except (RuntimeError, Unsupported) as error:
            why = f"the step cannot be captured: {str(error).strip().splitlines()[0]}"
        torch.cuda.synchronize(device)
        state.restore(before)
    if graphs is Graphs.ON:
        raise Unsupported("graphs", why)
    return Eager(run, state, device, world, seen, watch), why if device.type == "cuda" else ""
