"""The language model: causality, its start, and its loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from numdev.training.models.language import LanguageModel, next_token_loss


@pytest.fixture
def model() -> LanguageModel:
    made = LanguageModel(11, 12, 32, 2, 2)
    nn.init.normal_(made.out.weight)
    return made


def test_a_token_depends_on_none_behind_it(model: LanguageModel) -> None:
    tokens = torch.randint(0, 11, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_loss_starts_at_that_of_guessing() -> None:
    loss = next_token_loss(LanguageModel(11, 12, 32, 1, 2), torch.randint(0, 11, (4, 13)))
    assert loss.item() == pytest.approx(math.log(11), rel=1e-6)


def test_the_loss_is_the_mean_of_minus_log_p(model: LanguageModel) -> None:
    tokens = torch.randint(0, 11, (2, 9))
    p = model(tokens[:, :-1]).softmax(dim=-1)
    wanted = [-math.log(p[row, place, tokens[row, place + 1]].item()) for row in range(2) for place in range(8)]
    assert next_token_loss(model, tokens).item() == pytest.approx(sum(wanted) / 16, rel=1e-5)
