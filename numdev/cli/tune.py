"""`numdev tune`: pin the launch settings of the portable kernel for this GPU."""

from __future__ import annotations

import json
from pathlib import Path

from numdev.cli import plain
from numdev.cli.plain import Parser
from numdev.errors import BadInput

_MORE = """\
Rows that are not tuned this time are kept; each row says by which command, on which device and with which versions it was found.
Nothing is tuned when attention runs."""


def parser() -> Parser:
    """The arguments of the command."""
    purpose = "Checks and times candidates of the portable Triton kernel on this GPU; writes the fastest of each row to a table."
    own = Parser("tune", purpose, _MORE)
    own.setting("formats", "bf16,fp16", "formats of q, k, v and the output, between commas")
    own.setting("head_dims", "64,128", "head_dims, between commas")
    own.setting("masks", "none,causal", "none, causal or both")
    own.setting("n", "2048", "tokens of the problem that is timed")
    own.setting("out", "", "the table; numdev/data/launch.json unless given", "FILE")
    return own


def run(arguments: list[str]) -> int:
    """The command; returns the exit code."""
    return plain.run(lambda settings: _tune(vars(settings)), parser(), arguments)


def _tune(settings: dict[str, str]) -> int:
    import torch

    from numdev.arithmetic.formats import Format
    from numdev.attention.mask import Mask

    formats = [Format.parse(name) for name in settings["formats"].split(",")]
    masks = {"none": Mask(), "causal": Mask(causal=True)}
    for field, names in (("head_dims", settings["head_dims"].split(",")), ("n", [settings["n"]])):
        if not all(name.isdigit() and int(name) > 0 for name in names):
            raise BadInput(field, settings[field], "give whole numbers of at least 1")
    if unknown := [name for name in settings["masks"].split(",") if name not in masks]:
        raise BadInput("masks", unknown[0], "use none, causal")
    if not torch.cuda.is_available():
        raise BadInput("device", "cpu", "tuning needs a CUDA device, and torch finds none here")
    from numdev.attention.kernels import launch
    from numdev.attention.kernels.runtime import triton_version
    from numdev.attention.tuning import tune
    from numdev.cli.progress import ERRORS, output
    from numdev.results.files import write_atomically

    path = Path(settings["out"]) if settings["out"] else launch.TABLE
    rows = [
        (f, int(d), masks[m]) for f in formats for d in settings["head_dims"].split(",") for m in settings["masks"].split(",")
    ]
    origin = {
        "command": " ".join(["numdev tune", *(f"{key}={value}" for key, value in settings.items() if value and key != "out")]),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton_version()},
    }
    entries = launch.read(path)["entries"] if path.is_file() else []
    with ERRORS.status("tuning") as status:
        for fmt, head_dim, mask in rows:
            tuned = tune(fmt, head_dim, mask, int(settings["n"]), lambda text: status.update(f"tuning {text}"))
            text = " ".join(f"{key}={value}" for key, value in tuned.entry.items())
            output().print(f"{text} ({tuned.unlaunched} candidates did not launch, {tuned.wrong} were wrong)")
            entry = tuned.entry | origin
            entries = [old for old in entries if not _same_row(old, entry)] + [entry]
            write_atomically(
                path, (json.dumps({"entries": entries}, indent=2) + "\n").encode()
            )  # after every row: an interrupted run loses one
    output().print(f"{len(rows)} rows in {path}")
    return 0


def _same_row(a: dict[str, object], b: dict[str, object]) -> bool:
    return all(a[name] == b[name] for name in ("format", "head_dim", "mask", "generation"))
