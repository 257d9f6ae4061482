"""`numdev doctor`: runs a loop of one's own over `nd.doctor`, or reads what it left, and writes the page."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numdev.cli.compare import parsed
from numdev.errors import BadInput

_PURPOSE = """\
Says whether attention caused a loss spike. WHAT is the folder that a training
loop over nd.doctor has written; or package.module:setup, a function that
returns such a doctor and a function that does the step of a batch and returns
its loss, and then the steps are done here. The page is doctor.html in the
folder."""
_RULES = """\
Exit code: 0 if there is no spike, or exact attention spikes too; 1 if exact
attention removes the spike; 4 if that is undecided; 2 for what cannot be used."""
_CODES = {"no spike": 0, "not attention": 0, "attention": 1, "undecided": 4}


def run(arguments: Sequence[str]) -> int:
    """The exit code, as `_RULES` states it; raises NumdevError for what cannot be used or written, and as `parsed` does."""
    from numdev.cli.progress import output
    from numdev.report.document.pages import write_diagnosis
    from numdev.results.record import write_atomically

    places = {"what": "a folder, or package.module:setup"}
    what = parsed("numdev doctor", (_PURPOSE, _RULES), places, {}, arguments).what
    folder = _done(what) if ":" in what else Path(what)
    if (folder / "diagnosis.json").is_file():  # that of a rank
        folder = folder.parent
    ranks = sorted((path for path in folder.glob("rank*") if path.name[4:].isdecimal()), key=lambda path: int(path.name[4:]))
    if missing := [path.name for path in ranks or [folder] if not ranks or not (path / "diagnosis.json").is_file()]:
        hint = "give the folder of a loop over nd.doctor that has ended, or package.module:setup"
        raise BadInput("what", what, f"{missing[0]} holds no diagnosis; {hint}")
    every = [json.loads((path / "diagnosis.json").read_bytes()) for path in ranks]
    heads = [{"rank": rank, **head} for rank, own in enumerate(every) for head in own["heads"]]
    diagnosis = every[0] | {"heads": sorted(heads, key=_most)}
    lines = [f"{diagnosis['verdict'].upper()}: {diagnosis['sentence']}"]
    for each in diagnosis["replays"]:
        peak = "not finite" if each["peak"] is None else f"{each['peak']:.4g}"
        lines.append(f"  {'spikes' if each['spikes'] else 'stays':7}{peak:>11}  {each['title']}")
    write_atomically(folder / "doctor.html", write_diagnosis(diagnosis))
    output().print("\n".join([*lines, f"page: {folder / 'doctor.html'}"]), markup=False, highlight=False, soft_wrap=True)
    return _CODES[diagnosis["verdict"]]


def _most(head: Mapping[str, Any]) -> float:
    """The order of heads: an error that is not finite is null."""
    return -math.inf if head["error"] is None else -head["error"]


def _done(name: str) -> Path:
    """The folder of a doctor, after its loop."""
    from numdev.sources import loaded
    from numdev.training.doctor import doctor

    sys.path.append(str(Path.cwd()))  # where a script of one's own lies
    made = loaded(name, "what").function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], doctor) and callable(made[1])):
        raise BadInput("what", name, "return an nd.doctor, and a function that does the step of a batch and returns its loss")
    batches, step = made
    for batch in batches:
        try:
            loss = step(batch)
        except Exception as error:  # its exit code would be that of a verdict
            traceback.print_exc()
            raise BadInput("what", name, f"its step ends with {type(error).__name__}, see above") from error
        batches.note(loss)
    return batches.folder.parent
