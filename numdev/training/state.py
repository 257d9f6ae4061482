"""Everything that a step of training reads and changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from numdev.errors import BadInput
from numdev.training.numerics import LossScale
from numdev.training.run import Run
from numdev.training.start import initial

BETAS = 0.9, 0.99
EPSILON = 1e-8
_MOMENTS = {"mean": "exp_avg", "square": "exp_avg_sq", "updates": "step"}  # our names, and those of torch's AdamW


class State:
    """Model, optimizer and scale of the loss.

    AdamW (Loshchilov & Hutter 2019) with the decay on matrices alone; its moments exist from the start, so that a checkpoint
    always holds the same tensors. The learning rate is a tensor on the device: a CUDA graph reads what it holds at each replay.

    Attributes:
        model: see `initial`.
        optimizer: fused AdamW, one launch for all weights.
        scale: of the loss, or None where it is not scaled.
        rate: the learning rate of the next step, 0-dim.
        whole: whether no step is half done.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.whole = True
        self.model = initial(run, device)
        self.rate = torch.zeros((), device=device)
        self.scale = LossScale(device) if run.rung.numerics.scales_loss else None
        self.parameters = {name: x for name, x in self.model.named_parameters() if x.requires_grad}
        groups = [
            {"params": [x for x in self.parameters.values() if x.dim() >= 2], "weight_decay": run.task.weight_decay},
            {"params": [x for x in self.parameters.values() if x.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.rate,
            betas=BETAS,
            eps=EPSILON,
            fused=True,
            capturable=device.type == "cuda",
        )
        if self.scale is not None:
            self.optimizer.found_inf = self.scale.overflow  # type: ignore[attr-defined]  # as GradScaler hands it over
        for x in self.parameters.values():
            step = torch.zeros((), device=device)
            self.optimizer.state[x] = {"step": step, "exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}

    def weights(self) -> dict[str, Tensor]:
        """The parameters, as they are; each once where a model uses one twice."""
        return {name: x.detach() for name, x in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    def moments(self) -> dict[str, Tensor]:
        """`mean/<name>`, `square/<name>` and `updates/<name>` of the optimizer."""
        states = {name: self.optimizer.state[x] for name, x in self.parameters.items()}
        return {f"{ours}/{name}": state[theirs] for ours, theirs in _MOMENTS.items() for name, state in states.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step, as the optimizer took them up."""
        return {name: x.grad.detach() for name, x in self.parameters.items() if x.grad is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name, as it is and not copied."""
        found = {f"weight/{name}": x for name, x in self.weights().items()}
        found |= {f"buffer/{name}": x for name, x in self.buffers().items()} | self.moments()
        return found | ({f"loss/{name}": x for name, x in self.scale.tensors().items()} if self.scale is not None else {})

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take over the values of `tensors()`, in place, so that a captured graph reads them too.

        Raises:
            BadInput: where names, shapes or dtypes are not those of this model.
        """
        own = self.tensors()
        if {name: (x.shape, x.dtype) for name, x in own.items()} != {name: (x.shape, x.dtype) for name, x in saved.items()}:
            raise BadInput("checkpoint", "tensors of another model", "give the folder of this run, or an empty one")
        for name, x in own.items():
            x.copy_(saved[name])
        self.whole = True

    def checksum(self) -> str:
        """SHA-256 over names and FP32 bytes of the weights, in the order of their names."""
        return checksum(self.weights())


def checksum(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and FP32 bytes of tensors, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(f"{name}\0".encode() + weights[name].detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def model_of(run: Run, device: torch.device, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model of a run with the weights of a snapshot, in eval mode; buffers are as they were made.

    Raises:
        BadInput: where the names or shapes are not those of the model.
    """
    model = run.task.model(run.init_seed).to(device).eval()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    if any(name not in own or own[name].shape != x.shape for name, x in weights.items()):
        raise BadInput("snapshot", "weights of another model", "give the task that the run was of")
    with torch.no_grad():
        for name, x in weights.items():
            own[name].copy_(x)
    return model
