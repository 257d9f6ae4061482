"""How a command ends: its exit code, and one sentence for a mistake of the user."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from numdev.cli.composed import Composer, composer
from numdev.cli.library import config_folder
from numdev.cli.requests import type_mend
from numdev.errors import BadInput, BadOutput, NumdevError, StoreError
from numdev.nearest import is_near, one_of

if TYPE_CHECKING:
    from numdev.cli.drawing import Drawing
    from numdev.cli.plan import Plan
    from numdev.results.record import Status

FAILED, BAD_INPUT, UNSUPPORTED, BAD_OUTPUT, INTERRUPTED = 1, 2, 3, 5, 130
_GRAVEST_FIRST = (BAD_INPUT, FAILED, BAD_OUTPUT, UNSUPPORTED)
KNOWN = (NumdevError, HydraException, OmegaConfBaseException, YAMLError)


@dataclass(frozen=True)
class Ended:
    """How one job ended. It crosses processes: a launcher may run the job elsewhere.

    Attributes:
        code: 0, or one of the codes above; see `numdev.cli.codes`.
        sentence: what was wrong; empty where nothing was, or where it has been shown.
        figure: that of `objective`; None where there is none.
        job: the overrides of the job.
        number: the job's place in its sweep.
        said: what the job printed where the user does not see it.
        key: of the record of the point that was measured; empty for other jobs.
        line: figures, status and remark of the job's line in the table of a sweep; None where it prints none.
        plan: what a dry run found; None otherwise.
        drawing: the figure that is to be drawn when all jobs have ended; None where none is asked for.
    """

    code: int = 0
    sentence: str = ""
    figure: float | None = None
    job: str = ""
    number: int = 0
    said: str = ""
    key: str = ""
    line: tuple[tuple[str, ...], Status | None, str] | None = None
    plan: Plan | None = None
    drawing: Drawing | None = None

    def with_line(self, cells: tuple[str, ...], status: Status | None, remark: str) -> Ended:
        """The same with a line in the table of a sweep."""
        return replace(self, line=(cells, status, remark))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a study of which `kept` points are in the store."""

    def __init__(self, kept: int) -> None:
        super().__init__(kept)
        self.kept = kept


def gravest(codes: Iterable[int]) -> int:
    """The code of a command whose jobs ended with these: a bad setting, a failure, a bad output, what is unsupported, 0."""
    given = set(codes)
    return next((code for code in _GRAVEST_FIRST if code in given), max(given, default=0))


def code_of(error: Exception) -> int:
    """2 for what the user can mend, a setting or a full disk; 5 for an output that is no result; 1 for every other failure."""
    if isinstance(error, BadOutput):
        return BAD_OUTPUT
    return FAILED if isinstance(error, NumdevError) and not isinstance(error, (BadInput, StoreError)) else BAD_INPUT


def sentence_of(error: Exception, known: Composer | None = None) -> str:
    """One line: which setting, what is wrong with it, and what would do; `known` has the settings that the command could take."""
    if isinstance(error, NumdevError):
        return str(error)
    if isinstance(error.__cause__, NumdevError):  # of what Hydra made, such as a callback
        return str(error.__cause__)
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, YAMLError):
        return f"configs: a file is no YAML; {' '.join(str(error).split())}"
    return _composition(error, known)


def unforeseen(error: Exception) -> str:
    """One line for an unexpected error."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"numdev failed: {type(error).__name__}: {first}; HYDRA_FULL_ERROR=1 shows where"


def _missing(error: MissingConfigException) -> str:
    """An option that a group does not have."""
    wanted = error.missing_cfg_file or ""
    group, _, option = wanted.rpartition("/")
    mend = one_of(option, error.options) if error.options else "there is no such file in the config folders"
    return str(BadInput(group or "configs", option or wanted, mend))


def _unreadable(error: OverrideParseException) -> str:
    """An override that is not `setting=value`."""
    return f"{error.override}: it cannot be read as setting=value ({_first(error.message)}); quote what is special to the shell"


def _composition(error: Exception, known: Composer | None) -> str:
    """What Hydra and OmegaConf say of a setting that does not exist, has another type or refers to nothing."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(error)
    if unknown := re.search(r"Could not (?:override|append to config.*?) '?([\w./@-]+)'?", text):
        return _unknown(unknown[1], known or composer((config_folder(),)))
    if deleted := re.search(r"Could not delete from config\. '([^']*)'", text):
        return f"{deleted[1]}: a setting cannot be deleted; null is what most take for none"
    if ambiguous := re.search(r"Ambiguous value for argument '([^=]*)=(.*?)'\n", text):
        mend = f"a sweep needs -m, and a list brackets, {ambiguous[1]}=[{ambiguous[2]}]"
        return str(BadInput(ambiguous[1], ambiguous[2], mend))
    key = re.search(r"full_key: (\S+)", f"{cause}")
    if isinstance(cause, InterpolationResolutionError):
        return f"{key[1] if key else 'config'}: {_first(str(cause))}; refer to a setting that there is"
    if merging := re.search(r"Error merging override ([^=]*)=(.*)", text):
        return str(BadInput(merging[1].lstrip("+"), merging[2], type_mend(str(cause))))
    if key:
        return f"{key[1]}: {type_mend(str(cause))} (in a file of the config folders)"
    return "; ".join(line.strip().rstrip(".") for line in text.splitlines() if line.strip())


def _unknown(name: str, known: Composer) -> str:
    """A setting that the chosen options do not have."""
    group = name.partition(".")[0]
    if able := known.of_others(group, name):
        options, (has, that) = " and ".join(f"{group}={one}" for one in able), ("have", "one") if able[1:] else ("has", "that")
        return f"{name}: only {options} {has} it; take {that}, or leave it out"
    names = known.before_equals()
    alike = [one for one in names if one.count(".") == name.count(".")]  # a group's name is not mistyped into one of its settings
    return f"{name}: there is no such setting; {one_of(name, alike if is_near(name, alike) else names, most=12)}"


def _first(text: str) -> str:
    return text.splitlines()[0].rstrip(".")
