"""How large the error of a kernel is beside what its policy permits, case by case, and what that decides.

Permitted is the largest error among the kernels of the declared policy: tiled attention in the usual tiles, in either order, with
and without lazy rescales, and with split keys. A ratio of 1 is that; its interval is Student's t over the seeds, in logarithms,
where kernel and prediction have the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.certification.catalogue import Outputs
from numdev.certification.predictions import Known
from numdev.results.record import student_quantile

ABSURD = 1e9
"""The ratio of a result that is not finite, or not 0, where golden is."""
LIMIT_OF_LARGEST = 2.0
"""Of the largest error and the bias, beside the margin of the RMSE: so much they differ between tiles of one policy."""
_LIMIT_OF_LSE = 2.0
# An LSE is a sum of a maximum and a logarithm, each rounded to FP32; this, relative to it, is what exp2 and log2 may add.
LSE_FLOOR = 2.0**-19
_MOST_SEEDS = 1000
_DECIDES = 3.0  # times the permitted error that zeros have to err, for a case to tell a kernel from zeros


class Verdict(Enum):
    """What a certificate says."""

    PASS = "pass"  # as accurate as its policy permits
    LIMITED = "limited"  # so where it claims to be: it refuses some requests, or returns no LSE
    INCONCLUSIVE = "inconclusive"  # more seeds are needed
    FAIL = "fail"


@dataclass(frozen=True)
class Errors:
    """Figures of the error of an output over the rows that see a key: absolute, and the largest over `u max |golden|`."""

    rmse: float
    largest: float
    bias: float
    largest_u: float

    @staticmethod
    def of(x: Tensor, golden: Tensor, fmt: Format) -> Errors:
        """Of `x` against a golden that is finite; infinite where x is not."""
        error = x - golden
        if not bool(error.isfinite().all()):
            return Errors(math.inf, math.inf, math.inf, math.inf)
        largest, scale = float(error.abs().max()), fmt.u * float(golden.abs().max())
        return Errors(float(error.pow(2).mean().sqrt()), largest, abs(float(error.mean())), over(largest, scale))

    @staticmethod
    def most(every: Sequence[Errors]) -> Errors:
        """The largest of each figure."""
        return Errors(*(max(getattr(each, part) for each in every) for part in ("rmse", "largest", "bias", "largest_u")))


def permitted(known: Known, output: str) -> Errors:
    """The largest errors of an output among the kernels of the policy."""
    golden, fmt = known.rows(known.golden)[output], known.predictions.formats[output]
    return Errors.most([Errors.of(known.rows(each)[output], golden, fmt) for each in known.family.values()])


def ratios(known: Known, outputs: Outputs) -> tuple[dict[tuple[str, str], float], dict[str, Errors]]:
    """The errors of what a kernel returned over the permitted ones, by output and figure; and the errors."""
    result, errors = {}, {}
    for name, x in known.rows(outputs).items():
        golden, most = known.rows(known.golden)[name], permitted(known, name)
        own = errors[name] = Errors.of(x, golden, known.predictions.formats[name])
        if name == "lse":
            floor = LSE_FLOOR * (1.0 + float(golden.abs().mean()))
            result[name, "rmse"] = over(own.rmse + floor, most.rmse + floor)
            continue
        spread = 3 * most.rmse / math.sqrt(golden.numel())  # of the mean of independent errors of that size
        for part, extra in (("rmse", 0.0), ("largest", 0.0), ("bias", spread)):
            result[name, part] = over(getattr(own, part) + extra, getattr(most, part) + extra)
    return result, errors


def over(own: float, most: float) -> float:
    """The ratio of two errors; 1 of two that are 0, and at most `ABSURD`."""
    if own == most == 0:
        return 1.0
    return min(own / most, ABSURD) if most > 0 and math.isfinite(own) else ABSURD


@dataclass(frozen=True)
class Judged:
    """A figure of an output on a case over its seeds: the ratio to what is permitted, its interval, and what that decides.

    Each side of the interval is exceeded in 5 of 100 times. `seeds_needed` would decide what is inconclusive.
    """

    case: str
    output: str
    figure: str
    limit: float
    ratio: float
    low: float
    high: float
    verdict: Verdict
    seeds_needed: int = 0


def judge(case: str, of: Sequence[Mapping[tuple[str, str], float]], margin: float) -> list[Judged]:
    """Every figure of a case: FAIL where its interval lies above the limit, PASS below it, else the seeds that would decide."""
    judged = []
    for output, figure in of[0]:
        limit = _LIMIT_OF_LSE if output == "lse" else margin if figure == "rmse" else LIMIT_OF_LARGEST * margin
        own = [each[output, figure] for each in of]
        logs = [math.log(max(each, 1e-12)) for each in own]
        centre, count = sum(logs) / len(logs), len(logs)
        spread = math.sqrt(sum((each - centre) ** 2 for each in logs) / max(1, count - 1))
        half, needed = _half(spread, count), 0
        low, high = math.exp(centre - half), math.exp(min(centre + half, 700.0))
        verdict = Verdict.FAIL if low > limit or min(own) >= ABSURD else Verdict.PASS if high <= limit else Verdict.INCONCLUSIVE
        if verdict is Verdict.INCONCLUSIVE:
            distance = abs(math.log(limit) - centre)
            needed = next((seeds for seeds in range(count + 1, _MOST_SEEDS) if _half(spread, seeds) < distance), _MOST_SEEDS)
        judged.append(Judged(case, output, figure, limit, math.exp(centre), low, high, verdict, needed))
    return judged


def _half(spread: float, count: int) -> float:
    return student_quantile(0.9, count - 1) * spread / math.sqrt(count) if count > 1 else 700.0 if spread else 0.0


def error_of_zeros(known: Known) -> float:
    """How many times the permitted error a kernel that returns zeros has on a case."""
    return over(float(known.rows(known.golden)["out"].pow(2).mean().sqrt()), permitted(known, "out").rmse)


def decides(zeros: float) -> bool:
    """Whether a case with this `error_of_zeros` tells a kernel from one that returns zeros; others decide nothing alone."""
    return zeros >= _DECIDES
