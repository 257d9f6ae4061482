"""Into how many ranges the portable kernel splits the keys if `tiling.splits` is not given."""

from __future__ import annotations

import math

ROWS = 16  # rows of a block that holds all queries of a head; with more queries, blocks of rows fill the GPU
IDLE = 0.1  # share of the multiprocessors that may have no program


def split_count(blocks: int, keys: int, bc: int, multiprocessors: int) -> int:
    """How many ranges of keys to use for `blocks` programs, each with all its rows in one block, and `keys` in tiles of `bc`.

    As many as possible without giving a multiprocessor a second program, and one more if more than a tenth of the
    multiprocessors would be idle; no range is shorter than a tile. One range if the blocks alone occupy the GPU. The split thus
    depends only on the shape and the device.
    """
    if blocks > (1 - IDLE) * multiprocessors:
        return 1
    splits = multiprocessors // blocks
    if blocks * splits < (1 - IDLE) * multiprocessors:
        splits += 1
    return max(1, min(splits, math.ceil(keys / bc)))
