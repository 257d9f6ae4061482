"""A small encoder and its input, for tests of what runs under a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def model() -> nn.Module:
    """Two layers with two heads of 8."""
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)


@pytest.fixture
def x() -> Tensor:
    """Six tokens of two sequences."""
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
