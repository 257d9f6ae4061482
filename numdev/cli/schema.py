"""The type of every setting of the command line. Values stand in `configs/`; here a wrong type is found out.

A field is `MISSING` until a YAML file gives it, so that no default stands in two places. What a setting means is said once, in
the value object that it becomes and in `configs/hydra/help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class SourceConfig:
    """A `Distribution` (kind, parameter) or a `Captured` file (path, layer)."""

    kind: str = MISSING
    parameter: float | None = MISSING
    path: str | None = MISSING
    layer: str | None = MISSING


@dataclass
class ProblemConfig:
    """`Problem`, with its `Shape` and `Mask`; `n` is short for queries and keys."""

    n: int = MISSING
    batch: int = MISSING
    heads: int = MISSING
    kv_heads: int = MISSING
    queries: int = MISSING
    keys: int = MISSING
    head_dim: int = MISSING
    causal: bool = MISSING
    window: int | None = MISSING
    key_lengths: list[int] | None = MISSING
    scale: float | None = MISSING
    source: SourceConfig = field(default_factory=SourceConfig)


@dataclass
class QuantiseConfig:
    """`Quantised`; null is as in the preset."""

    to: str | None = MISSING
    scale: str | None = MISSING
    block: int | None = MISSING
    block_q: int | None = MISSING
    hadamard: bool | None = MISSING
    smoothing: str | None = MISSING
    smoothing_block: int | None = MISSING
    values: str | None = MISSING
    values_scale: str | None = MISSING
    seed: int | None = MISSING


@dataclass
class PrecisionConfig:
    """`Precision`: a preset and the steps that differ from it; null is as in the preset."""

    preset: str = MISSING
    inputs: str | None = MISSING
    scores: str | None = MISSING
    exponential: str | None = MISSING
    rescale: str | None = MISSING
    row_sum: str | None = MISSING
    probabilities: str | None = MISSING
    values: str | None = MISSING
    accumulator: str | None = MISSING
    output: str | None = MISSING
    quantise: QuantiseConfig = field(default_factory=QuantiseConfig)


@dataclass
class TilingConfig:
    """`Tiling`, and how its sides are found."""

    br: int | None = MISSING
    bc: int | None = MISSING
    sram: int | None = MISSING
    shape: str = MISSING
    order: str | None = MISSING
    stride: int = MISSING
    seed: int = MISSING
    splits: int | None = MISSING


@dataclass
class SoftmaxConfig:
    """`OnlineSoftmax`; its `Exponential` is `exp`, or a polynomial with `exp_coefficients` in `exp_share` of the columns."""

    normalise: str = MISSING
    maximum: str = MISSING
    exp: str | None = MISSING
    exp_coefficients: list[float] | None = MISSING
    exp_share: float | None = MISSING
    scale_on: str = MISSING
    rescale_threshold: float = MISSING
    p_scale: float = MISSING
    tie_shift: float | None = MISSING
    sum_over: str = MISSING


@dataclass
class AttentionConfig:
    """Which implementation is measured."""

    kind: str = MISSING
    count: bool = MISSING
    normalise: str = MISSING
    function: str | None = MISSING
    backend: str = MISSING
    products: str = MISSING
    kernel: str = MISSING


@dataclass
class BaselineConfig:
    """What the variant is compared with besides golden."""

    kind: str = MISSING
    precision: str | None = MISSING
    normalise: str = MISSING


@dataclass
class PointConfig:
    """One point, where it runs and where its record goes."""

    problem: ProblemConfig = field(default_factory=ProblemConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    tiling: TilingConfig = field(default_factory=TilingConfig)
    softmax: SoftmaxConfig = field(default_factory=SoftmaxConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    seeds: int | None = MISSING
    device: str = MISSING
    results: str = MISSING
    fresh: bool = MISSING


@dataclass
class StudyConfig:
    """A file of `configs/study`; see `numdev.cli.expand`."""

    title: str = MISSING
    figure: str | None = None
    more: list[str] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)
    scenarios: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)


@dataclass
class MeasureConfig(PointConfig):
    """`numdev measure`."""

    study: StudyConfig | None = MISSING
    shard: int = MISSING
    shards: int = MISSING
    objective: str | None = MISSING


@dataclass
class PaperConfig(MeasureConfig):
    """`numdev paper`, whose file includes that of `measure`."""

    studies: list[str] = MISSING
    out: str = MISSING


@dataclass
class TimingConfig:
    """`numdev.measurement.speed.timing.Budget`."""

    seconds: float = MISSING
    least: int = MISSING
    most: int = MISSING


@dataclass
class SpeedConfig(MeasureConfig):
    """`numdev speed`, whose file includes that of `measure`."""

    timing: TimingConfig = field(default_factory=TimingConfig)
    counters: bool = MISSING
    out: str = MISSING


@dataclass
class ReportConfig:
    """`numdev report`."""

    results: str = MISSING
    out: str = MISSING
    studies: Any = MISSING
    format: str = MISSING


GROUPS = ("problem", "precision", "tiling", "softmax", "attention", "baseline")


def register() -> None:
    """Make the types known to Hydra, which the primary files of `configs/` name in their defaults lists."""
    store = ConfigStore.instance()
    for name, node in (("measure", MeasureConfig), ("paper", PaperConfig), ("report", ReportConfig), ("speed", SpeedConfig)):
        store.store(name=f"{name}_schema", node=node)
