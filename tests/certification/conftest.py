"""Predictions that all tests and workers share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of predictions, beside those of the workers."""
    return tmp_path_factory.getbasetemp().parent / "predictions"
