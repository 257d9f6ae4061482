"""`numdev certify`: settings as `name=value`, or as `--name value`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numdev.cli.compare import parsed
from numdev.errors import BadInput, one_of

_PURPOSE = """\
Judges an attention kernel by what its number formats permit, and names the step
that errs. No tolerance is needed: permitted is the error of tiled attention in
the same formats, which numdev computes element by element."""
_RULES = """\
The kernel is package.module:function, called as function(q, k, v, mask=, scale=)
and returning out, or out and LSE; or one of: triton, flex, vanilla, sdpa,
sdpa_flash, sdpa_cudnn, sdpa_efficient, sdpa_math, flash_attn (the newest, or
flash_attn_2, flash_attn_3, flash_attn_4), sageattention.

Exit code: 0 PASS, and LIMITED where the kernel refuses some inputs or returns
no LSE; 1 FAIL; 4 INCONCLUSIVE; 2 for what cannot be used, or if the certificate
cannot be written; 3 where the kernel refuses every input; 5 where the kernel raises, or returns another shape or dtype."""
_FORMATS = ("json", "pdf", "html")
_SETTINGS: dict[str, tuple[Any, str]] = {  # default and meaning
    "precision": ("kernel_bf16", "policy that the kernel claims: kernel_bf16, kernel_fp16 or kernel_fp32"),
    "backward": (
        "",
        "judges gradients: package.module:function, called as function(q, k, v, out, lse, do, mask=, scale=) and returning dq, "
        "dk and dv; autograd through the kernel; or triton, flex, vanilla, sdpa, sdpa_flash, ...",
    ),
    "device": ("auto", "auto, cpu or cuda"),
    "depth": ("quick", "quick: 3 to 8 seeds, heads of 64; full: 5 to 20 seeds, heads of 64 and 128"),
    "margin": (1.1, "how many times the permitted RMSE the kernel may err"),
    "seed": (0, "the first seed"),
    "head_dim": (0, "size of the heads; 0 takes those of depth"),
    "only": ("", "some inputs and probes by name, as [normal,padding]; else all"),
    "out": ("reports/certify", "folder where certificate.json is written"),
    "format": ("json", "json; pdf or html writes certificate.pdf or certificate.html too"),
    "cache": ("", "folder of predictions, which serve every kernel; else numdev's in the user's caches"),
}


def read(arguments: Sequence[str]) -> Namespace:
    """The kernel and the settings; BadInput for what the command does not take."""
    return parsed("numdev certify", (_PURPOSE, _RULES), {"kernel": "what is judged, see below"}, _SETTINGS, arguments)


def run(arguments: Sequence[str]) -> int:
    """The exit code, as `_RULES` states it.

    Raises:
        BadInput: for what cannot be used.
        SystemExit: see `numdev.cli.compare.parsed`.
    """
    from rich.progress import Progress

    from numdev.certification.certificate import Depth, certify
    from numdev.cli.progress import ERRORS, output
    from numdev.results.record import write_atomically
    from numdev.results.store import refuse_unwritable
    from numdev.settings import choice

    settings = read(arguments)
    if settings.format not in _FORMATS:
        raise BadInput("format", settings.format, one_of(settings.format, _FORMATS))
    out, depth = Path(settings.out), choice("depth", Depth, settings.depth)
    refuse_unwritable("out", out)
    sys.path.append(str(Path.cwd()))  # where a kernel of one's own lies
    with Progress(console=ERRORS, transient=True, disable=not ERRORS.is_terminal) as bar:
        task = bar.add_task("")
        certificate = certify(
            settings.kernel,
            settings.precision,
            backward=settings.backward or None,
            device=settings.device,
            depth=depth,
            margin=settings.margin,
            seed=settings.seed,
            head_dim=settings.head_dim or None,
            only=[name.strip() for name in settings.only.strip("[]").split(",") if name.strip()],
            cache=Path(settings.cache) if settings.cache else None,
            progress=lambda done, total, text: bar.update(task, completed=done, total=total, description=text),
        )
    output().print(certificate.text(), markup=False, highlight=False, soft_wrap=True)
    documents = {"json": certificate.json()}
    if settings.format != "json":
        from numdev.report.document.certificate import write_page  # late: pandas, matplotlib and the typesetter are large

        documents[settings.format] = write_page(certificate.summary(), certificate.table(), settings.format)
    for suffix, data in documents.items():
        path = out / f"certificate.{suffix}"
        write_atomically(path, data)
        output().print(f"certificate: {path}", markup=False, highlight=False, soft_wrap=True)
    return certificate.exit_code
