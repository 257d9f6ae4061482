"""One measured point as plain data: what was measured, where, how it ended, and every figure."""

from __future__ import annotations

import hashlib
import html
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import Format
from numdev.arithmetic.microscale import Microscaled
from numdev.arithmetic.quantise import Quantised
from numdev.arithmetic.rounding import Cast
from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential


class Status(Enum):
    """How a measurement ended."""

    OK = "ok"
    NONFINITE = "nonfinite"  # measured, but variant, baseline or golden holds NaN, or Inf where another has none
    UNSUPPORTED = "unsupported"  # the variant said that it cannot do this
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"


def describe(value: object) -> Any:
    """A value object as plain data, in one canonical form: what a key is the hash of.

    A dataclass becomes its class name and its fields; an Enum its value; a precision policy its steps as text.
    """
    if isinstance(value, Precision):
        steps = value.steps() | {"name": value.name}
        return steps | ({"quantise": describe_fields(value.inputs)} if isinstance(value.inputs, Quantised) else {})
    if isinstance(value, (Cast, Dot, Exponential, Format, Microscaled)):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | describe_fields(value)
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no canonical form")


def describe_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, and its `digest` where it stands for a file."""
    described = {}
    for f in fields(value):
        item = getattr(value, f.name)
        whole = isinstance(item, int) and "float" in str(f.type)  # 4 and 4.0 are equal, and so are objects that hold them
        described[f.name] = describe(float(item) if whole else item)
    return described | ({"digest": value.digest} if hasattr(value, "digest") else {})


_INFORMATION = ("revision",)  # facts of an environment that change no result


def key_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The point's key: a hash of its canonical configuration, of the sources that computed it and of the environment.

    The environment holds the digest of numdev's sources (`numdev.sources`); the configuration that of a user's function and of a
    captured file. The state of a repository, `revision`, is information for the reader: neither a commit nor documentation makes
    another key.
    """
    facts = {name: value for name, value in environment.items() if name not in _INFORMATION}
    text = json.dumps({"config": config, "environment": facts}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Record:
    """One point.

    Attributes:
        key: see `key_of`.
        config: canonical description of problem, variant, baseline and seeds.
        environment: see `numdev.results.environment.environment`.
        status: how it ended; `reason` says why where it is not `ok`.
        rows: one per (seed, subject, output, reference), with every metric of `Deviation`, and the `cluster` of the replicate:
            the group of replicates that are alike, empty where all are independent; of a measurement of speed one per
            seed, with the figures of `numdev.measurement.speed.columns`. The subject is the variant or the
            baseline; the reference `golden` (unrounded inputs: total error), `golden_same_inputs` (the subject's rounded
            inputs: arithmetic error) or `baseline`.
        counters: one per seed, what the variant's run counted of itself.
        seconds: wall time of the measurement.
        kernel: what really ran, as the variant says: see `Output.kernel`.
    """

    key: str
    config: dict[str, Any]
    environment: dict[str, str]
    status: Status
    reason: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    counters: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    kernel: str = ""

    def to_json(self) -> bytes:
        return json.dumps(vars(self) | {"status": self.status.value}, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> Record:
        """Read what `to_json` wrote.

        Raises:
            ValueError: if the data are torn or not a record.
        """
        try:
            loaded = json.loads(data)
            return Record(**(loaded | {"status": Status(loaded["status"])}))
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a record: {error}") from None

    def summaries(self, metric: str = "max_difference") -> list[dict[str, Any]]:
        """Mean, 95 % confidence interval and range of a metric over seeds, per subject, output and reference."""
        groups: dict[tuple[str, str, str], list[float]] = {}
        for row in self.rows:
            groups.setdefault((row["subject"], row["output"], row["reference"]), []).append(float(row[metric]))
        names = ("subject", "output", "reference")
        return [dict(zip(names, group, strict=True)) | summary(values).as_dict() for group, values in groups.items()]

    def _cells(self) -> Iterator[tuple[str, ...]]:
        if "subject" not in self.rows[0]:  # a measurement of speed compares nothing: one row per replicate
            for name in self.rows[0]:
                yield name, *(f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for row in self.rows)
            return
        yield "subject", "output", "reference", "max difference", "rmse", "Wasserstein", "max ulp", "bits"
        by_metric = [self.summaries(m) for m in ("max_difference", "rmse", "wasserstein", "max_ulp", "agreement_bits")]
        for together in zip(*by_metric, strict=True):
            head = together[0]
            yield head["subject"], head["output"], head["reference"], *(f"{s['mean']:.3g}" for s in together)

    def __repr__(self) -> str:
        seeds = len({row["seed"] for row in self.rows})
        head = f"Record({self.status.value}, {seeds} seeds, {self.seconds:.2f} s" + (f": {self.reason})" if self.reason else ")")
        lines = list(self._cells()) if self.rows else []
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))] if lines else []
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([head, *table])

    def _repr_html_(self) -> str:
        header, *body = list(self._cells()) if self.rows else [("status",), (self.status.value,)]
        rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in body)
        caption = f"{self.status.value}, {self.seconds:.2f} s {html.escape(self.reason)}"
        head = "".join(f"<th>{cell}</th>" for cell in header)
        return f"<table><caption>{caption}</caption><tr>{head}</tr>{rows}</table>"


@dataclass(frozen=True)
class Summary:
    """Mean, 95 % confidence interval of the mean (Student's t) and range of some replicates."""

    mean: float
    low: float
    high: float
    least: float
    most: float
    count: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def summary(values: list[float], confidence: float = 0.95) -> Summary:
    """Summarise replicates. One value alone has an infinitely wide interval; NaN anywhere makes every figure NaN."""
    count = len(values)
    if any(map(math.isnan, values)):
        return Summary(math.nan, math.nan, math.nan, math.nan, math.nan, count)
    mean = math.fsum(values) / count if all(map(math.isfinite, values)) else math.nan
    half = math.inf
    if count > 1:
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        half = student_quantile(confidence, count - 1) * math.sqrt(variance / count)
    return Summary(mean, mean - half, mean + half, min(values), max(values), count)


def student_quantile(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t."""
    from scipy.special import stdtrit  # imported late: scipy costs more than the rest of numdev's import

    quantile: Callable[[int, float], Any] = stdtrit
    return float(quantile(freedom, 0.5 + confidence / 2))
