"""The model as training finds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from numdev.errors import BadInput, Unsupported
from numdev.training.run import Run


def initial(run: Run, device: torch.device) -> nn.Module:
    """The model of the run's seed, one weight moved where the rung says so, in the dtype of its weights.

    Raises:
        Unsupported: for a model with dropout, which draws numbers that a resumed run would not draw again.
        BadInput: where no weight can be moved.
    """
    model = run.task.model(run.init_seed)
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise Unsupported("task.model", f"{name} drops values at random, which no resumed run can repeat; set its p to 0")
    if run.rung.ulp:
        _move(model, run.rung.ulp)
    return model.to(device=device, dtype=run.rung.numerics.weights).train()


def moved(parameters: dict[str, Tensor]) -> tuple[str, int]:
    """Name and flat index of the weight that `Rung.ulp` moves: the first that is not 0 of the largest matrix.

    The largest is the parameter of at least two dimensions with the most elements, the first of equals, of those that hold
    anything but 0: a last place of 0 would be a subnormal number.

    Raises:
        BadInput: where there is none.
    """
    matrices = {name: x for name, x in parameters.items() if x.dim() >= 2 and bool(x.count_nonzero())}
    if not matrices:
        raise BadInput("rung.ulp", "a model without a matrix that is not 0", "give 0")
    name = max(matrices, key=lambda each: matrices[each].numel())
    return name, int(matrices[name].reshape(-1).nonzero()[0])


def _move(model: nn.Module, ulp: int) -> None:
    """Move the weight away from zero by `ulp` last places of FP32, or towards it where `ulp` is negative."""
    parameters = {name: x.detach() for name, x in model.named_parameters()}
    name, index = moved(parameters)
    bits = parameters[name].view(-1).view(torch.int32)
    magnitude = int(bits[index]) & _MAGNITUDE
    if not 0 <= magnitude + ulp < _INFINITY:
        mend = f"the weight {float(parameters[name].view(-1)[index]):g} would pass 0 or the largest number of FP32; give fewer"
        raise BadInput("rung.ulp", ulp, mend)
    bits[index] += ulp  # sign and magnitude: the next number away from zero has the next bit pattern


_MAGNITUDE, _INFINITY = 0x7FFF_FFFF, 0x7F80_0000  # bits of an FP32 number without its sign, and those of infinity
