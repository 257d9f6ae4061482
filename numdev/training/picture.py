"""Pictures as one PNG file."""

from __future__ import annotations

import math
import struct
import zlib

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
    """An RGB picture as PNG (ISO/IEC 15948), without filters."""
    _, height, width = picture.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), picture.permute(1, 2, 0).reshape(height, 3 * width)], 1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits for each of red, green and blue
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows.numpy().tobytes(), 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
