"""`numdev map`: the error of every element of one head, as figures and numbers."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from numdev.cli import build, expand
from numdev.cli.compose import overrides_of
from numdev.cli.exit_codes import UNSUPPORTED, Ended
from numdev.cli.progress import output
from numdev.errors import BadInput, Unsupported
from numdev.measurement.deviation import Place, Subject, head_of
from numdev.results.record import Reference, write_atomically
from numdev.results.store import refuse_unwritable
from numdev.settings import choice

if TYPE_CHECKING:
    from numdev.cli.launch import Job

_TITLE = 60  # characters beside the words at the right of the histogram
_BESIDE = ("out=", "device=", "output=", "head=", "seed=")  # of what stands in the title anyway


def draw(cfg: DictConfig, job: Job) -> Ended:
    """Compute, write and describe what the configuration says.

    Raises:
        BadInput: naming the setting that cannot be used.
    """
    from numdev.report.document.export import to_csv  # late: pandas and matplotlib
    from numdev.report.figures.elements import element_errors, error_summary, write_errors

    hydra, out = HydraConfig.get(), Path(cfg.out)
    overrides, choices = overrides_of(hydra), hydra.runtime.choices
    subject, against = choice("subject", Subject, cfg.subject), choice("reference", Reference, cfg.reference)
    place = Place(cfg.output or "", cfg.head, cfg.seed, subject, against)
    refuse_unwritable("out", out)
    if choices.get("study") is not None:
        raise BadInput("study", choices["study"], "numdev map draws one point; state its settings, as numdev measure takes them")
    if not place.needs_baseline and any(text.lstrip("+").startswith(("baseline=", "baseline.")) for text in overrides):
        hint = "it is not drawn; give subject=baseline or reference=baseline too, or leave it out"
        raise BadInput("baseline", choices["baseline"], hint)
    request = expand.expander(hydra, cfg).request()
    request = replace(request, raw=request.raw | {"seeds": place.seed + 1})  # as many replicates as it takes
    measured, bench = build.point(request), build.runner(job.command, cfg)
    try:
        head = head_of(bench.kind.operation, measured.problem, measured.variant, place, bench.device, measured.baseline)
    except Unsupported as error:
        return Ended(UNSUPPORTED, str(error))
    if hydra.mode is not RunMode.RUN:  # each job of a sweep has a folder
        out /= hydra.job.override_dirname.replace("/", "_") or "defaults"
    elements, reference = element_errors(head.x, head.reference, head.fmt), place.reference.value.replace("_", " ")
    where = f"{f'head {place.head} of {head.heads}, ' if head.heads > 1 else ''}replicate {place.seed}"
    settings = " ".join(text for text in overrides if not text.startswith(_BESIDE)) or "defaults"
    title = f"{head.output}, {where}\n{textwrap.shorten(settings, _TITLE, placeholder=' ...')}"
    files = [*write_errors(elements, title, out, reference=reference), out / "elements.csv"]
    write_atomically(files[-1], to_csv(elements))
    precision = f" precision={request.options['precision']}" if "precision" in request.options else ""
    own = f"{build.kind_of(request)}{precision}"
    if subject is Subject.BASELINE:
        own = f"baseline={request.options.get('baseline', 'custom')}"
    first = f"{head.output} of {own}: {where}, {' x '.join(map(str, head.x.shape))} elements"
    for line in (first, *error_summary(elements, reference), f"map: {out}: {', '.join(path.name for path in files)}"):
        output().print(line, markup=False, highlight=False, soft_wrap=True)
    return Ended()
