"""Random errors of the size of an attention's own: a control that has the size of a structured error, and nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.attention.base import Backward
from numdev.attention.differentiable import rounded_once
from numdev.attention.mask import Mask
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.attend import Answer, Inputs

_PRIME = 2**31 - 1


@dataclass(frozen=True)
class Noise:
    """Plain attention with random errors of the size of the difference between `attention` and it, element by element.

    Let O be of plain attention, and E the difference of the other's from it on the same q, k and v. The result is O + s dose E,
    with random signs s: of dose 1 each element errs as much as with the other attention, in a direction of its own. Below 1, the
    error of an element is s E with probability dose^2, else 0: E is often one last place, and there is no quarter of one. The
    expected square of all errors is dose^2 that of E either way. So are those of dQ, dK and dV, of the same dO. Of dose 0, bits
    are those of plain attention. Signs are a function of O, or of dO: runs that are equal so far draw the same.
    """

    attention: Backward
    dose: float

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """See `numdev.training.attend.Trainable`."""
        return _Noisy(self, mask, scale).of(q, k, v)

    def mixed(self, plain: Tensor, other: Tensor, random: torch.Generator) -> Tensor:
        """Plain values with random errors of the size of their difference from others, in their dtype."""
        draws = torch.rand(2, *plain.shape, dtype=torch.float64, generator=random).to(plain.device)
        factor = torch.where(draws[0] < 0.5, -1.0, 1.0) * max(self.dose, 1.0) * (draws[1] < self.dose**2)
        error = other.double() - plain.double()
        return rounded_once(plain.double() + factor * error, plain.dtype)


class _Noisy(Answer):
    """One call."""

    def __init__(self, noise: Noise, mask: Mask, scale: float | None) -> None:
        super().__init__(mask, scale)
        self._noise = noise

    def forward(self, inputs: Inputs) -> Tensor:
        """O of plain attention, with errors."""
        plain = self.compute("plain", VanillaBackward(self._noise.attention.format), inputs)
        return self._noise.mixed(plain, self.compute("other", self._noise.attention, inputs), _random(plain))

    def backward(self, do: Tensor) -> Inputs:
        """The gradients of plain attention, with errors."""
        random, of = _random(do), self.gradients(do)
        return tuple(self._noise.mixed(x, y, random) for x, y in zip(of["plain"], of["other"], strict=True))


def _random(x: Tensor) -> torch.Generator:
    """A generator whose seed is a sum of the bits of a tensor, times their places."""
    bits = x.detach().float().contiguous().view(-1).view(torch.int32).long()
    places = torch.arange(1, bits.numel() + 1, device=x.device) * 48271 % _PRIME
    return torch.Generator().manual_seed(int((bits % _PRIME * places % _PRIME).sum()))
