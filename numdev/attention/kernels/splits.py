"""Into how many ranges the portable kernel divides the keys where it is left to choose."""

from __future__ import annotations

import math

ROWS = 16  # of a block that holds all queries of a head: beyond, there are blocks of rows to fill the GPU with
IDLE = 0.1  # share of the multiprocessors that may have no program


def split_count(blocks: int, keys: int, bc: int, multiprocessors: int) -> int:
    """Ranges of keys for a launch of `blocks` programs, which hold all their rows in one block, against `keys` in tiles of `bc`.

    As many as give no multiprocessor a second program, and one more where that leaves over a tenth of them idle; none is shorter
    than a tile. One where the blocks alone occupy the GPU. So what is combined follows from the shape and the device alone.
    """
    if blocks > (1 - IDLE) * multiprocessors:
        return 1
    splits = multiprocessors // blocks
    if blocks * splits < (1 - IDLE) * multiprocessors:
        splits += 1
    return max(1, min(splits, math.ceil(keys / bc)))
