"""The parts of pages that are made from the code, from `configs/` and from `reports/reference`: none stands in git a second time.

MkDocs' plugin `macros` replaces `{{ name() }}` in a page by what the function `name` of `BLOCKS` yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from docs_hooks import gallery, tables

BLOCKS: tuple[Callable[[], Iterator[str]], ...] = (
    gallery.gallery,
    tables.changelog,
    tables.claims,
    tables.columns,
    tables.commands,
    tables.decode_speed,
    tables.honoured,
    tables.kernel_speed,
    tables.backward_speed,
    tables.launch_table,
    tables.meanings,
    tables.notebooks,
    tables.options,
    tables.rules,
    tables.settings,
    tables.study_table,
)


def define_env(env: Any) -> None:
    """Called by the plugin: tells it the names of the blocks."""
    for block in BLOCKS:
        env.macro(lambda block=block: "\n".join(block()), block.__name__)
