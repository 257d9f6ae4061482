"""`numdev map`: the error of every element of one head, as figures and numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from numdev.cli import build, studies
from numdev.cli.composed import of_points
from numdev.cli.console import output
from numdev.cli.honoured import kind_of
from numdev.cli.outcome import UNSUPPORTED, Ended
from numdev.cli.requests import Request, flat, request
from numdev.cli.runners import runner
from numdev.errors import BadInput, Unsupported
from numdev.measurement.deviation.head import Compared, Head, Place, Reference, Subject
from numdev.nearest import choice, one_of
from numdev.results.files import refuse_unwritable

_TITLE = 60  # characters beside the words at the right of the histogram


def draw(cfg: DictConfig, overrides: Sequence[str]) -> Ended:
    """Compute, write and describe what the configuration asks for; `overrides` are what the command line states.

    Raises:
        BadInput: naming the setting that cannot be used.
    """
    from numdev.report.document import map as document  # late: pandas and matplotlib
    from numdev.report.figures.elements import element_errors

    _refuse(cfg, overrides)
    place = _place(cfg)
    asked = _request(cfg, place)
    point = build.point(asked)
    bench = runner("map", cfg)
    compared = Compared(bench.kind.operation, point.problem, point.variant, point.baseline)
    try:
        found = compared.head(place, bench.device)
    except Unsupported as error:
        return Ended(UNSUPPORTED, str(error))
    elements = element_errors(found.x, found.reference, found.fmt)
    reference = place.reference.value.replace("_", " ")
    out, title = _folder(cfg), _title(found, place, overrides)
    files = [
        *document.write_figures(elements, title, out, reference=reference),
        document.write_numbers(elements, cfg.format, out),
    ]
    console = output()
    head = f"{found.output} of {_words(asked, place)}: {_where(found, place)}, {' x '.join(map(str, found.x.shape))} elements"
    for line in (head, *document.summary(elements, reference), f"map: {out}: {', '.join(path.name for path in files)}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return Ended()


def _refuse(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raise BadInput for what is stated and would have no effect, StoreError for a folder that cannot be written."""
    from numdev.report.document.map import WRITERS

    refuse_unwritable("out", Path(cfg.out))
    if cfg.format not in WRITERS:
        raise BadInput("format", cfg.format, one_of(cfg.format, WRITERS))
    if HydraConfig.get().runtime.choices.get("study") is not None:
        mend = "numdev map draws one point; state its settings, as numdev measure takes them"
        raise BadInput("study", HydraConfig.get().runtime.choices["study"], mend)
    named = [text.lstrip("+").partition("=")[0] for text in overrides]
    if not _place(cfg).needs_baseline and any(name.partition(".")[0] == "baseline" for name in named):
        value = HydraConfig.get().runtime.choices["baseline"]
        raise BadInput("baseline", value, "it is not drawn; give subject=baseline or reference=baseline too, or leave it out")


def _place(cfg: DictConfig) -> Place:
    subject, reference = choice("subject", Subject, cfg.subject), choice("reference", Reference, cfg.reference)
    return Place(cfg.output or "", cfg.head, cfg.seed, subject, reference)


def _request(cfg: DictConfig, place: Place) -> Request:
    """The point, with as many replicates as there must be for the one that is drawn."""
    hydra = HydraConfig.get()
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    raw = dict(flat(plain)) | {"seeds": place.seed + 1}
    expander = studies.expander(hydra, cfg)
    return request(raw, expander.said(raw, expander.task), of_points(hydra.runtime.choices))


def _folder(cfg: DictConfig) -> Path:
    """That of the command, or of the job in a sweep."""
    hydra = HydraConfig.get()
    if hydra.mode is RunMode.RUN:
        return Path(cfg.out)
    return Path(cfg.out) / (hydra.job.override_dirname.replace("/", "_") or "defaults")


def _words(asked: Request, place: Place) -> str:
    """What is looked at, by its options."""
    if place.subject is Subject.BASELINE:
        return f"baseline={asked.options.get('baseline', 'custom')}"
    precision = asked.options.get("precision")
    return f"{kind_of(asked)}{f' precision={precision}' if precision else ''}"


def _where(found: Head, place: Place) -> str:
    head = f"head {place.head} of {found.heads}, " if found.heads > 1 else ""
    return f"{head}replicate {place.seed}"


def _title(found: Head, place: Place, overrides: Sequence[str]) -> str:
    """Output and place, and below what the command line states."""
    beside = ("out=", "device=", "format=", "output=", "head=", "seed=")
    stated = " ".join(text for text in overrides if not text.startswith(beside)) or "defaults"
    return f"{found.output}, {_where(found, place)}\n{textwrap.shorten(stated, _TITLE, placeholder=' ...')}"
