"""The parts of pages that are made from the code, from `configs/` and from `reports/reference`: none stands in git a second time.

MkDocs' plugin `macros` replaces `{{ name() }}` in a page by what the function `name` of `BLOCKS` yields, and
`{{ figure(...) }}` by one number of the reference results, `{{ spread(...) }}` by the smallest and the largest of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from docs_hooks import gallery, measured, quoted, tables

BLOCKS: tuple[Callable[..., Iterator[str]], ...] = (
    gallery.gallery,
    measured.backward_speed,
    measured.certified,
    measured.certified_backward,
    measured.claims,
    measured.decode_speed,
    measured.fp8_kernel,
    measured.fp8_steps,
    measured.instrument_speed,
    measured.instrumented_speed,
    measured.kernel_speed,
    measured.mismatch,
    measured.paper,
    measured.roofline,
    tables.assumed,
    tables.changelog,
    tables.columns,
    tables.commands,
    tables.honoured,
    tables.launch_table,
    tables.notebooks,
    tables.options,
    tables.rules,
    tables.settings,
    tables.study_table,
)


def define_env(env: Any) -> None:
    """Called by the plugin: tells it the names of the blocks."""
    for block in BLOCKS:
        env.macro(lambda *given, block=block: "\n".join(block(*given)), block.__name__)
    env.macro(lambda *given, **row: tables.powers(quoted.figure(*given, **row)), "figure")
    env.macro(quoted.spread, "spread")
    env.macro(quoted.ratio, "ratio")
