"""Plugins of numdev, where Hydra looks for plugins. Other applications of Hydra find them, and no config of theirs names them."""

from __future__ import annotations

from numdev.cli import sweep


class NumdevSweeper(sweep.Combinations):
    """The sweeper of `configs/hydra/sweeper/numdev.yaml`."""


class KeepingLauncher(sweep.Keeping):
    """The launcher that `numdev.cli.sweep.KeepReturned` names."""
