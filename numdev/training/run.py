"""One run: a task, and how it differs; the settings of torch under which it always has the same bits; and a step of it.

A step is called operation by operation or replayed as a CUDA graph; `State` is all that it reads and changes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from numdev.attention.operation import environment as of_attention
from numdev.errors import BadInput, Unsupported
from numdev.results.environment import environment
from numdev.results.record import describe, key_of
from numdev.training.attend import CallCounts
from numdev.training.data import Purpose, stream
from numdev.training.rung import APART, Numerics, Restart, Rung
from numdev.training.tasks import Batch, Task
from numdev.training.watch import FIGURES, Watch

_MIXED = 16  # batches whose rows another order mixes: they are in memory at once
_FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "float32_matmul": "highest"}
"""Settings that `deterministic` makes, by its name in an environment; a variable that is set already stays."""
_MOMENTS = {"mean": "exp_avg", "square": "exp_avg_sq", "updates": "step"}  # our names, and those of torch's AdamW
_FIRST_SCALE = 2.0**16
_CLEAN_STEPS = 2000  # after which the scale is doubled, as torch.amp.GradScaler does
_WARM_UPS = 3  # steps before a capture: allocator, cuBLAS and Triton have done then what they do once
_MAGNITUDE, _INFINITY = 0x7FFF_FFFF, 0x7F80_0000  # bits of an FP32 number without its sign, and those of infinity


@dataclass(frozen=True)
class Run:
    """A task, and how it is trained."""

    task: Task
    rung: Rung

    def __post_init__(self) -> None:
        if self.task.batch % self.rung.ranks:
            raise BadInput("rung.ranks", self.rung.ranks, f"give a number that divides the batch of {self.task.batch}")
        if self.half is not None and not 0 < self.half < self.task.steps:
            raise BadInput("rung.restart", self.rung.restart.value, "one step has no half; give task.steps of at least 2")

    @property
    def init_seed(self) -> int:
        return self.rung.seed + APART * self.rung.init

    @property
    def half(self) -> int | None:
        """The step after which the run restarts, or None."""
        return None if self.rung.restart is Restart.NONE else self.task.steps // 2

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches of the steps from `start` on: those of the task, or their examples in the order of the rung.

        Another order is a permutation of the rows of all batches of the run: the steps are permuted, and then the rows within
        each 16 batches that follow each other. What the task draws for a row (noise, a time, a dropped caption) stays with it.
        """
        task, order = self.task, self.rung.order
        if not order:
            yield from (task.batch_of(step, self.rung.seed) for step in range(start, task.steps))
            return
        seed = self.rung.seed + APART * order
        steps = stream(Purpose.REORDERED, seed, 0).permutation(task.steps).tolist()
        for first in range(start - start % _MIXED, task.steps, _MIXED):
            parts = [task.batch_of(step, self.rung.seed) for step in steps[first : first + _MIXED]]
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            rows = torch.from_numpy(stream(Purpose.REORDERED, seed, first + 1).permutation(len(parts) * task.batch))
            for own in rows.split(task.batch)[max(start - first, 0) :]:
                yield {name: x[own] for name, x in whole.items()}

    def key(self, device: torch.device) -> str:
        """Of configuration, sources and environment, with what `deterministic` sets: runs of one key have the same bits."""
        facts = environment(device) | of_attention(device)
        facts |= {name: os.environ.get(name, value) for name, value in _FIXED.items() if name in facts}
        return key_of({"run": describe(self)}, facts)


def refused(folder: Path, why: str) -> BadInput:
    """The error of a folder that holds something else than this run."""
    return BadInput("folder", str(folder), f"{why}; give another folder, or delete it")


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms alone, no TF32, no search for the fastest convolution; the settings before are restored.

    An operation that has no deterministic algorithm raises RuntimeError.
    """
    name, cudnn = "CUBLAS_WORKSPACE_CONFIG", torch.backends.cudnn
    with ExitStack() as before:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        before.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns)
        before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision(_FIXED["float32_matmul"])
        # Filling memory would write every new tensor once more.
        fill = torch.utils.deterministic, "fill_uninitialized_memory"
        for module, one in (fill, (cudnn, "allow_tf32"), (cudnn, "benchmark")):
            before.callback(setattr, module, one, getattr(module, one))
            setattr(module, one, False)
        if name not in os.environ:
            os.environ[name] = _FIXED[name]
            before.callback(os.environ.pop, name)
        yield


def initial(run: Run, device: torch.device) -> nn.Module:
    """The model of the run's seed in the dtype of its weights; `Rung.ulp` moves one away from zero by last places of FP32.

    Raises Unsupported for a model with dropout, whose numbers no resumed run would draw again; BadInput where no weight can be
    moved.
    """
    model = run.task.model(run.init_seed)
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise Unsupported("task.model", f"{name} drops values at random, which no resumed run can repeat; set its p to 0")
    if ulp := run.rung.ulp:
        parameters = {name: x.detach() for name, x in model.named_parameters()}
        name, index = moved(parameters)
        bits = parameters[name].view(-1).view(torch.int32)
        if not 0 <= (int(bits[index]) & _MAGNITUDE) + ulp < _INFINITY:
            weight = f"the weight {float(parameters[name].view(-1)[index]):g}"
            raise BadInput("rung.ulp", ulp, f"{weight} would pass 0 or the largest number of FP32; give fewer")
        bits[index] += ulp  # sign and magnitude: the next number away from zero has the next bit pattern
    dtype = torch.bfloat16 if run.rung.numerics is Numerics.BF16_WEIGHTS else torch.float32
    return model.to(device=device, dtype=dtype).train()


def moved(parameters: dict[str, Tensor]) -> tuple[str, int]:
    """Name and flat index of the weight that `Rung.ulp` moves: the first that is not 0 of the largest matrix.

    The largest is the parameter of at least two dimensions with the most elements, the first of equals, of those that hold
    anything but 0: a last place of 0 would be a subnormal number. Raises BadInput where there is none.
    """
    matrices = {name: x for name, x in parameters.items() if x.dim() >= 2 and bool(x.count_nonzero())}
    if not matrices:
        raise BadInput("rung.ulp", "a model without a matrix that is not 0", "give 0")
    name = max(matrices, key=lambda each: matrices[each].numel())
    return name, int(matrices[name].reshape(-1).nonzero()[0])


class LossScale:
    """By how much the loss is multiplied, so that its gradients do not underflow FP16.

    A step whose gradients are not finite is skipped and halves the scale; 2,000 clean steps in a row double it. A power of two
    rounds nothing above the subnormals. Everything stays on the device: nothing waits for it, and a CUDA graph can hold it.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), _FIRST_SCALE, device=device)
        self.clean = torch.zeros((), dtype=torch.int32, device=device)  # steps since the scale last changed
        self.overflow = torch.zeros((), device=device)  # 1 where the gradients are not finite, else 0; AdamW reads it

    def update(self, norm: Float[Tensor, ""]) -> None:
        """Take note of the norm of the unscaled gradients, before the optimizer's step."""
        self.overflow.copy_(norm.isfinite().logical_not())
        torch._amp_update_scale_(self.scale, self.clean, self.overflow, 2.0, 0.5, _CLEAN_STEPS)


class State:
    """Model, optimizer, scale of the loss, and losses and norms of the steps that were done, all on the device.

    AdamW (Loshchilov & Hutter 2019), one launch for all weights, with the decay on matrices alone; its moments exist from the
    start, so that a checkpoint always holds the same tensors. The learning rate is a tensor on the device: a CUDA graph reads
    what it holds at each replay.

    Attributes:
        losses: of each step.
        norms: of the gradients of each step before clipping; not finite under a scaled loss: the optimizer skipped the step.
        watched: the figures of each step of a rung that is watched.
        graph: of which steps are replays, or None.
        seen: calls of attention in the last step that was not a replay.
    """

    def __init__(self, run: Run, device: torch.device, seen: CallCounts, watch: Watch | None = None) -> None:
        self._run, self._device, self.seen, self._watch = run, device, seen, watch
        self.graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch = {}
        self._outputs: tuple[Tensor, Tensor]
        self.model = initial(run, device)
        self.rate = torch.zeros((), device=device)
        numerics, dtype = run.rung.numerics, torch.float16 if run.rung.numerics is Numerics.FP16 else torch.bfloat16
        self._casting = torch.autocast(device.type, dtype, enabled=numerics is not Numerics.FP32)
        self.scale = LossScale(device) if numerics is Numerics.FP16 else None
        self.losses, self.norms = (torch.zeros(run.task.steps, device=device) for _ in range(2))
        self.watched = torch.zeros(run.task.steps if watch else 0, len(FIGURES), dtype=torch.float64, device=device)
        self.parameters = {name: x for name, x in self.model.named_parameters() if x.requires_grad}
        groups = [
            {"params": [x for x in self.parameters.values() if (x.dim() >= 2) is matrix], "weight_decay": decay}
            for matrix, decay in ((True, run.task.weight_decay), (False, 0.0))
        ]
        how: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "fused": True, "capturable": device.type == "cuda"}
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, **how)
        if self.scale is not None:
            self.optimizer.found_inf = self.scale.overflow  # type: ignore[attr-defined]  # as GradScaler hands it over
        for x in self.parameters.values():
            step = torch.zeros((), device=device)
            self.optimizer.state[x] = {"step": step, "exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}

    def weights(self) -> dict[str, Tensor]:
        """The parameters, as they are; each once where a model uses one twice."""
        return {name: x.detach() for name, x in self.model.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        """`mean/<name>`, `square/<name>` and `updates/<name>` of the optimizer."""
        states = {name: self.optimizer.state[x] for name, x in self.parameters.items()}
        return {f"{ours}/{name}": state[theirs] for ours, theirs in _MOMENTS.items() for name, state in states.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step, as the optimizer took them up."""
        return {name: x.grad.detach() for name, x in self.parameters.items() if x.grad is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on and all that was noted, by name, as it is and not copied."""
        tensors = {f"weight/{name}": x for name, x in self.weights().items()} | self.moments()
        tensors |= {f"buffer/{name}": x for name, x in self.model.named_buffers()}
        if self.scale is not None:
            tensors |= {"loss/scale": self.scale.scale, "loss/clean": self.scale.clean}
        return tensors | {"history/losses": self.losses, "history/norms": self.norms, "history/watched": self.watched}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take over the values of `tensors()`, in place, so that a captured graph reads them too."""
        for name, x in self.tensors().items():
            x.copy_(saved[name])

    def step(self, number: int, batch: Batch) -> None:
        """Do a step and note its loss and norm."""
        self.rate.fill_(self._run.task.rate_at(number) * self._run.rung.rate)
        if self.graph is None:
            self._outputs = self.update({name: x.to(self._device) for name, x in batch.items()})
        else:
            for name, x in batch.items():
                self._inputs[name].copy_(x)
            self.graph.replay()
        self.losses[number], self.norms[number] = self._outputs
        if self._watch is not None:
            self.watched[number] = self._watch.row

    def update(self, batch: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Loss and norm of the gradients of a step, without any wait for the device.

        Loss under the rung's numerics, gradients, their mean over the ranks, their clipping to a norm, AdamW.
        """
        task, scale = self._run.task, self.scale
        self.seen.calls = 0
        self.seen.elsewhere.clear()
        if self._watch is not None:
            self._watch.begin()
        loss = self._differentiate(batch) if self._run.rung.ranks == 1 else self._average(batch)
        with torch.no_grad(), torch._C.DisableTorchFunction():  # interception would look at each operation
            norm = get_total_norm([x.float() for x in self.gradients().values()])
            if task.clip > 0:
                clip_grads_with_norm_(self.parameters.values(), task.clip, norm)
            if scale is not None:
                scale.update(norm)
            self.optimizer.step()
        return loss, norm

    def _differentiate(self, batch: Batch) -> Float[Tensor, ""]:
        """The loss of a batch; its gradients, by the parameters, are those of the loss without its scale."""
        for x in self.parameters.values():
            x.grad = None
        with self._casting:
            loss = self._run.task.loss(self.model, batch).float()
        (loss if self.scale is None else loss * self.scale.scale).backward()
        if self.scale is not None:
            torch._foreach_mul_(list(self.gradients().values()), self.scale.scale.reciprocal())
        return loss.detach()

    def _average(self, batch: Batch) -> Float[Tensor, ""]:
        """The mean loss of the ranks, and the means of their gradients in FP32: those of data-parallel processes, one by one."""
        ranks, flat = self._run.rung.ranks, list[Tensor]()
        for own in zip(*(x.chunk(ranks) for x in batch.values()), strict=True):
            parts = [self._differentiate(dict(zip(batch, own, strict=True))), *self.gradients().values()]
            flat.append(torch.cat([x.reshape(-1).float() for x in parts]))
        means = (sum(flat[1:], flat[0]) / ranks).split([part.numel() for part in parts])
        for part, mean in zip(parts, means, strict=True):
            part.copy_(mean.view_as(part))
        return parts[0]

    def capture(self, batch: Batch) -> str:
        """Have steps replay one CUDA graph, whose inputs are copied into the same memory; or return why it cannot be.

        A step of the text-to-image model of 10 million parameters on an H200 takes 16.4 ms so, and 79 ms without: it is bound by
        launches (`python -m benchmarks.training`). `batch` has the shapes of all batches; its values leave nothing behind.
        """
        device, before = self._device, {name: x.clone() for name, x in self.tensors().items()}
        self._inputs = {name: x.to(device) for name, x in batch.items()}
        try:
            side, main, graph = torch.cuda.Stream(device), torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self.update(self._inputs)
            main.wait_stream(side)
            self.restore(before)
            for x in self.parameters.values():
                x.grad = None  # the graph's own memory holds them from now on
            torch.cuda.synchronize(device)
            with torch.cuda.graph(graph):
                self._outputs = self.update(self._inputs)
        except (RuntimeError, Unsupported) as error:
            torch.cuda.synchronize()
            self.restore(before)
            return f"the step cannot be captured: {str(error).strip().splitlines()[0]}"
        self.graph = graph
        return ""


def checksum(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and FP32 bytes of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\0".encode() + weights[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def model_of(run: Run, device: torch.device, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model of a run with the parameters and buffers of a snapshot, in eval mode."""
    model = run.task.model(run.init_seed).to(device).eval()
    model.load_state_dict(weights, strict=False)  # a weight that is used twice has one of its names
    return model
