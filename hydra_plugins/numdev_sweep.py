"""The plugin of numdev, in the package in which Hydra looks for plugins.

Other applications of Hydra in the same environment find it too, but use it only if their configuration names it.
"""

from __future__ import annotations

from numdev.cli import launch


class KeepingLauncher(launch.Keeping):
    """The launcher that `numdev.cli.launch.KeepReturned` names."""
