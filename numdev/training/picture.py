"""Pictures as one PNG file."""

from __future__ import annotations

import math
from io import BytesIO

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

_MOST, _ACROSS, _ENLARGED = 32, 8, 3  # pictures, pictures in a row, pixels for one
_GAP = 2  # white pixels between two, before they are enlarged


def contact_sheet(pictures: Float[Tensor, "count 3 height width"]) -> bytes:
    """The first pictures, whose values lie in [-1, 1], side by side in rows, as PNG."""
    shown = ((pictures[:_MOST].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    count, _, height, width = shown.shape
    across = min(count, _ACROSS)
    rows = math.ceil(count / across)
    sheet = torch.full((3, rows * (height + _GAP) - _GAP, across * (width + _GAP) - _GAP), 255, dtype=torch.uint8)
    for place in range(count):
        y, x = place // across * (height + _GAP), place % across * (width + _GAP)
        sheet[:, y : y + height, x : x + width] = shown[place]
    return png(sheet.repeat_interleave(_ENLARGED, 1).repeat_interleave(_ENLARGED, 2))


def png(picture: UInt8[Tensor, "3 height width"]) -> bytes:
    """An RGB picture as PNG."""
    from PIL import Image  # late: only what draws samples needs it

    written = BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).save(written, "PNG")
    return written.getvalue()
