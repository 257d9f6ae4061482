"""How a command ends: its exit code, and one sentence for a mistake of the user."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from numdev.errors import BadInput, BadOutput, NumdevError, StoreError, Unsupported, one_of

if TYPE_CHECKING:
    from numdev.measurement.studies import Plan
    from numdev.results.record import Status

FAILED, BAD_INPUT, UNSUPPORTED, BAD_OUTPUT = 1, 2, 3, 5
_WORST_FIRST = (BAD_INPUT, FAILED, BAD_OUTPUT, UNSUPPORTED)
_OF_STATUS = {"ok": 0, "error": FAILED, "out_of_memory": FAILED, "unsupported": UNSUPPORTED}  # of every other one BAD_OUTPUT
_OF_HYDRA = (HydraException, OmegaConfBaseException, YAMLError)


@dataclass(frozen=True)
class Ended:
    """How one job ended. It crosses processes, as a launcher may run the job elsewhere; as a number it is the job's figure."""

    code: int = 0
    sentence: str = ""  # what was wrong; empty where nothing was, or where it has been shown
    figure: float | None = None  # that of `objective`
    overrides: tuple[str, ...] = ()  # of the job
    number: int | None = None  # its place in the sweep; None of a job by itself
    printed: str = ""  # by the job, where the user does not see it
    key: str = ""  # of the record of the point that was measured; empty for other jobs
    row: Mapping[str, str] = field(default_factory=dict)  # in the table of a sweep: figures, status and remark by column
    plan: Plan | None = None  # of a dry run

    def __float__(self) -> float:
        """For a sweeper that minimises; one without a figure counts as failed."""
        if self.figure is None:
            raise ValueError(self.sentence or "the figure is NaN, or there is none")
        return self.figure


def worst(codes: Iterable[int]) -> int:
    """The code of a command whose jobs ended with these: a bad setting, a failure, a bad output, what is unsupported, 0."""
    ended = set(codes)
    return next((code for code in _WORST_FIRST if code in ended), max(ended, default=0))


def code_of_point(status: Status) -> int:
    """The code of a point asked for by itself, or as a job of a sweep: 0 only if it has figures of every element.

    A format that overflows ends with `BAD_OUTPUT`: it is measured, and the command prints which output has how many NaN and Inf.
    """
    return _OF_STATUS.get(status.value, BAD_OUTPUT)


def code_of_study(statuses: Collection[Status]) -> int:
    """The code of a run of a study: `FAILED` for an error; else as `code_of_results`."""
    return FAILED if "error" in {status.value for status in statuses} else code_of_results(statuses)


def code_of_results(statuses: Iterable[Status]) -> int:
    """The code of a report: `BAD_OUTPUT` where a point ended so; else 0 if one has figures, as others may lack them by design.

    If none has, the worst code of the points.
    """
    codes = set(map(code_of_point, statuses))
    return BAD_OUTPUT if BAD_OUTPUT in codes else 0 if 0 in codes else worst(codes)


def code_of(error: Exception) -> int:
    """2 for a setting or a full disk; 3 for what an implementation refuses; 5 for an output that is no result; else 1."""
    if isinstance(error, (BadOutput, Unsupported)):
        return BAD_OUTPUT if isinstance(error, BadOutput) else UNSUPPORTED
    return BAD_INPUT if isinstance(error, (BadInput, StoreError, *_OF_HYDRA)) else FAILED


def sentence_of(error: Exception) -> str:
    """One line: which setting, what is wrong with it, and what would do."""
    for each in (error, error.__cause__):  # the cause of what Hydra made, such as a callback
        if isinstance(each, NumdevError):
            return str(each)
    text = str(error)
    if not isinstance(error, _OF_HYDRA):
        first = (text.strip().splitlines() or [""])[0]
        return f"numdev failed: {type(error).__name__}: {first}; HYDRA_FULL_ERROR=1 shows where"
    if isinstance(error, MissingConfigException):  # an option that a group does not have
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        hint = one_of(option, error.options) if error.options else "there is no such file in the config folders"
        return str(BadInput(group or "configs", option, hint))
    if isinstance(error, OverrideParseException):
        why = error.message.splitlines()[0].rstrip(".")
        return f"{error.override}: it cannot be read as setting=value ({why}); quote what is special to the shell"
    if isinstance(error, YAMLError):
        return f"configs: a file is no YAML; {' '.join(text.split())}"
    cause = str(error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error)
    if key := re.search(r"full_key: (\S+)", cause):
        return f"{key[1]}: {cause.splitlines()[0]} (in a file of the config folders)"
    return "; ".join(line.strip().rstrip(".") for line in text.splitlines() if line.strip())
