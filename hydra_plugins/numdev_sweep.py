"""The plugins of numdev, in the package in which Hydra looks for plugins.

Other applications of Hydra in the same environment find them too, but use them only if their configuration names them.
"""

from __future__ import annotations

from numdev.cli import sweep


class NumdevSweeper(sweep.Combinations):
    """The sweeper of `configs/hydra/sweeper/numdev.yaml`."""


class KeepingLauncher(sweep.Keeping):
    """The launcher that `numdev.cli.sweep.KeepReturned` names."""
