"""The compiled kernel that computed a result, and its launch settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelLaunch:
    """The compiled kernel that really ran; `str` is what results show as `kernel`.

    Attributes:
        name: of the kernel; empty for tensor operations, and where it is not known.
        br, bc: its tile, where it is known.
        warps, stages: of its launch, where they are known.
        splits: ranges of keys whose results it combined.
    """

    name: str = ""
    br: int | None = None
    bc: int | None = None
    warps: int | None = None
    stages: int | None = None
    splits: int = 1

    def __str__(self) -> str:
        settings = {"br": self.br, "bc": self.bc, "warps": self.warps, "stages": self.stages}
        known = [f"{name}={value}" for name, value in settings.items() if value is not None]
        return " ".join([self.name, *known, *([] if self.splits == 1 else [f"splits={self.splits} combined=lse"])])
