"""`numdev certify`: the arguments of `numdev.certify`, as `name=value` or `--name value`."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from inspect import getdoc, signature
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from numdev.cli.compare import parsed
from numdev.errors import NotAChoice

_RULES = """\
Exit code: 0 PASS, and LIMITED where the kernel refuses some inputs or returns
no LSE; 1 FAIL; 4 INCONCLUSIVE; 2 for what cannot be used, or if the certificate
cannot be written; 3 where the kernel refuses every input; 5 where the kernel
raises, or returns another shape, dtype or device."""
_FORMATS = ("json", "pdf", "html")
_OUTPUT = {
    "out": ("reports/certify", "folder of certificate.json, which replaces an earlier one"),
    "format": ("json", "json; pdf or html writes certificate.pdf or certificate.html too"),
}


def read(arguments: Sequence[str]) -> Namespace:
    """The kernel and the settings as text; BadInput for what the command does not take."""
    from numdev.certification.certificate import certify
    from numdev.certification.kernel import KERNELS

    about, _, meanings = (getdoc(certify) or "").partition("Args:\n")
    known, settings = signature(certify).parameters, dict[str, tuple[str, str]]()
    for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", meanings.partition("\n\n")[0], re.M):
        default = "" if known[name].default in (None, (), known[name].empty) else str(known[name].default)
        settings[name] = default, " ".join(text.split())
    kernel, _ = settings.pop("kernel"), settings.pop("progress")
    names = fill(f"Kernels with names: {', '.join(KERNELS)}.", 80)
    texts = fill(" ".join(about.split()), 80), f"{names}\n\n{_RULES}"
    return parsed("numdev certify", texts, {"kernel": kernel[1]}, settings | _OUTPUT, arguments)


def run(arguments: Sequence[str]) -> int:
    """The exit code, as `_RULES` states it.

    Raises:
        BadInput: for what cannot be used.
        SystemExit: see `numdev.cli.compare.parsed`.
    """
    from rich.progress import Progress

    from numdev.certification.certificate import certify
    from numdev.cli.progress import ERRORS, output
    from numdev.results.record import write_atomically
    from numdev.results.store import refuse_unwritable
    from numdev.settings import converted, types_of

    settings = vars(read(arguments))
    out, kind = Path(settings.pop("out")), settings.pop("format")
    if kind not in _FORMATS:
        raise NotAChoice("format", kind, _FORMATS)
    refuse_unwritable("out", out)
    sys.path.append(str(Path.cwd()))  # where a kernel of one's own lies
    types = types_of(certify)
    values: dict[str, Any] = {name: text for name, text in settings.items() if text}
    values |= {name: converted(name, types[name], yaml.safe_load(text)) for name, text in values.items() if name != "only"}
    with Progress(console=ERRORS, transient=True, disable=not ERRORS.is_terminal) as bar:
        update = partial(bar.update, bar.add_task(""))
        certificate = certify(**values, progress=lambda done, total, text: update(completed=done, total=total, description=text))
    output().print(certificate.text(), markup=False, highlight=False, soft_wrap=True)
    documents = {"json": certificate.json()}
    if kind != "json":
        from numdev.report.document.pages import write_certificate  # late: pandas, matplotlib and the typesetter are large

        documents[kind] = write_certificate(certificate.summary(), kind)
    for suffix, data in documents.items():
        write_atomically(out / f"certificate.{suffix}", data)
        output().print(f"certificate: {out / f'certificate.{suffix}'}", markup=False, highlight=False, soft_wrap=True)
    return certificate.exit_code
