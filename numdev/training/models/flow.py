"""Rectified flow: the velocity from noise to a picture, its loss, and the way along it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Float32
from torch import Tensor

Prediction = Callable[[Tensor, Tensor], Tensor]
"""f(x, t): the pictures [batch, ...] that noisy ones [batch, ...] at times [batch] become."""

Velocity = Callable[[Tensor, Tensor], Tensor]
"""v(x, t): a velocity [batch, ...] at points [batch, ...] and times [batch]."""


def between(noise: Float[Tensor, "batch ..."], picture: Float[Tensor, "batch ..."], time: Float[Tensor, " batch"]) -> Tensor:
    """The point x_t = (1 - t) noise + t picture of the straight way from noise (t = 0) to the picture (t = 1)."""
    t = time.reshape(-1, *[1] * (noise.dim() - 1))
    return torch.lerp(noise, picture, t.expand_as(noise))


def flow_loss(
    picture_of: Prediction,
    noise: Float32[Tensor, "batch ..."],
    picture: Float32[Tensor, "batch ..."],
    time: Float32[Tensor, " batch"],
) -> Float32[Tensor, ""]:
    """Mean of (1 - t)^2 || (X_1 - X_0) - v(X_t, t) ||^2, which is that of || X_1 - f(X_t, t) ||^2; FP32.

    Rectified flow minimises E || (X_1 - X_0) - v(X_t, t) ||^2 with X_t = (1 - t) X_0 + t X_1 (Liu, Gong and Liu 2022,
    arXiv 2209.03003, equation 1; Lipman et al. 2022, arXiv 2210.02747, equation 23 with sigma_min = 0). Here the model predicts
    the picture, f = X_t + (1 - t) v, which lies in far fewer dimensions than the velocity (Li and He 2025, arXiv 2511.13720),
    and the weight (1 - t)^2 keeps the last details, where noise is nearly gone, from outweighing the rest. The minimum is the
    same at every weight: the mean of X_1 over all that pass X_t at t. Mean over the batch and the pixels.
    """
    found = picture_of(between(noise, picture, time), time)
    return (found.float() - picture).square().mean()


def velocity_of(picture_of: Prediction) -> Velocity:
    """v(x, t) = (f(x, t) - x) / (1 - t) for t < 1: straight to the picture that is predicted."""

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        return (picture_of(x, time) - x) / (1 - time).reshape(-1, *[1] * (x.dim() - 1))

    return velocity


def euler(velocity: Velocity, noise: Float[Tensor, "batch ..."], steps: int) -> Float[Tensor, "batch ..."]:
    """Follows dx/dt = v(x, t) from noise at t = 0 to t = 1 in equal steps x <- x + v(x, t) / steps.

    Exact, but for rounding, where the flow is straight: v is then the same along the way.
    """
    x = noise
    for step in range(steps):
        x = x + velocity(x, x.new_full((len(x),), step / steps)) / steps
    return x


def guided(conditional: Prediction, free: Prediction, weight: float) -> Prediction:
    """Classifier-free guidance: f = f_free + weight (f_conditional - f_free) (Ho and Salimans 2022, arXiv 2207.12598).

    It is the same for f as for v, which is linear in f.
    """

    def prediction(x: Tensor, time: Tensor) -> Tensor:
        without = free(x, time)
        return without + weight * (conditional(x, time) - without)

    return prediction
