"""Records of training runs with known laws of growth, so that the verdict of every claim is known before it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from numdev.report.reading.frames import flatten
from numdev.results.record import Column, Record, Status
from numdev.results.store import EntryRole, Role, Scenario, Store
from numdev.results.study import Study, StudyPoint
from numdev.training.weights import TABLES

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
METRICS = ("max_difference", "wasserstein", "relative_frobenius")
_SCENARIO = Scenario("scenes", "text to image, 0.85 million weights", Role.ASSUMED)


@dataclass(frozen=True)
class Law:
    """How a difference goes: `end (step / last)^power`, by metric `end` times `shape`.

    Attributes:
        end: the Wasserstein distance at the last step.
        power: the exponent of the step.
        start: added at every step, as a difference that was there before training.
        noise: standard deviation of the logarithm over replicates, and of the exponent.
        until: the step at which the run stopped.
    """

    end: float
    power: float = 0.5
    start: float = 0.0
    noise: float = 0.01
    until: int = STEPS[-1]

    def at(self, step: int, seed: int, label: str) -> float:
        """The Wasserstein distance of one replicate; replicates of different rungs are independent."""
        spread, tilt = self.noise * np.random.default_rng([seed, *label.encode()]).standard_normal(2)
        value = self.start + self.end * (step / STEPS[-1]) ** (self.power + tilt) if step else self.start
        return float(np.exp(spread) * value)


SHAPE = {"max_difference": 50.0, "wasserstein": 1.0, "relative_frobenius": 20.0}
VANILLA = {"type": "VanillaBackward", "fmt": "bf16"}
TRITON = {"type": "TritonBackward", "fmt": "bf16"}
FLASH = {"type": "SdpaBackward", "backend": "flash", "fmt": "bf16"}
EXACT = {"type": "RoundedBackward", "fmt": "bf16"}
TILED = {"type": "TiledBackward", "precision": {"name": "bf16"}}


@dataclass(frozen=True)
class Trained:
    """A point: the label of its rung, what of the rung differs, its law, the numerics of its reference, and its role."""

    label: str
    law: Law
    rung: Mapping[str, Any] = field(default_factory=dict)
    against: str = "autocast_bf16"
    role: str = ""

    @property
    def title(self) -> str:
        """Its label in the study."""
        return self.label.replace("_", " ")


def ladder(**laws: Law) -> list[Trained]:
    """The whole ladder; a law of a name replaces the one that bears the claims of the source out."""
    usual: dict[str, tuple[Law, dict[str, Any]]] = {
        "sham": (Law(0.0), {"repeat": 1}),
        "triton": (Law(1e-4), {"attention": TRITON}),
        "sdpa_flash": (Law(0.9e-4), {"attention": FLASH}),
        "tiled_bf16": (Law(1.5e-4), {"attention": TILED}),
        "one_ulp": (Law(1.6e-4), {"ulp": 1}),
        "init_1": (Law(8e-4, start=2e-4), {"init": 1}),
        "init_2": (Law(7e-4, start=2e-4), {"init": 2}),
        "order": (Law(6e-4), {"order": 1}),
        "ranks_2": (Law(1.7e-4), {"ranks": 2}),
        "fp16": (Law(4.4e-4, 0.6), {"numerics": "autocast_fp16"}),
        "exact": (Law(0.0), {"restart": "exact"}),
        "lossy": (Law(5e-4), {"restart": "lossy"}),
        "bf16_weights": (Law(9e-4, 0.7), {"numerics": "bf16_weights"}),
        "noise_0": (Law(0.0), {"attention": TRITON, "noise": 0.0}),
        "noise_quarter": (Law(0.5e-4), {"attention": TRITON, "noise": 0.25}),
        "noise_1": (Law(1.05e-4), {"attention": TRITON, "noise": 1.0}),
        "noise_4": (Law(2e-4), {"attention": TRITON, "noise": 4.0}),
        "golden": (Law(1e-4), {"attention": EXACT}),
        "from_exact_FP32_inside": (Law(0.6e-4), {"attention": TRITON}),
        "from_exact_every_step_in_BF16": (Law(1.2e-4), {"attention": TILED}),
        "rate": (Law(3e-4), {"rate": 1.001}),
    }
    roles = {"sham": "control", "one_ulp": "control"}
    return [
        Trained(name, laws.get(name, law), rung, "fp32" if "numerics" in rung else "autocast_bf16", roles.get(name, ""))
        for name, (law, rung) in usual.items()
        if laws.get(name, law) is not None
    ]


def stored(
    path: Path,
    points: list[Trained],
    name: str = "fig8",
    claims: tuple[str, ...] = (),
    *,
    seeds: int = 3,
    losses: bool = False,
    apart: bool = False,
) -> Store:
    """A store with one study of these points, or with a point for each replicate of them where they are `apart`.

    Its report has losses only with `losses`, which take time to draw.
    """
    store = Store(path)
    listed = dict[str, StudyPoint]()
    for place, point in enumerate(points):
        roles = {"rung": EntryRole(point.role)} if point.role else {}
        whole = StudyPoint(None, None, None, seeds, "scenes", {"rung": point.title}, roles=roles)
        made = record(f"{name}-{place}", point, seeds)
        if not apart:
            store.put(made)
            listed[made.key] = whole
        for seed in range(seeds) if apart else ():
            tables = {of: [row for row in rows if row["seed"] == seed] for of, rows in made.tables.items()}
            store.put(replace(made, key=f"{made.key}-{seed}", tables=tables, config=made.config | {"seeds": 1}))
            listed[f"{made.key}-{seed}"] = replace(whole, seeds=1, replicate=seed)
    study = Study(
        name,
        "Weights over training",
        command=f"numdev train study={name}",
        figure="training_ladder" if name == "fig8" else "training_weights",
        claims=claims,
        points=tuple(listed.values()),
        more=("training_loss",) if losses else (),
        scenarios=(_SCENARIO,),
    )
    settings = [Column("variant.ulp", "ulp", "by how many last places one weight is moved before training")]
    store.put_study(name, study.manifest([*listed], "training", settings))
    return store


def rows_of(points: list[Trained], seeds: int = 3) -> pd.DataFrame:
    """The rows of all weights together that a report reads of `stored` points, without a store."""
    rows: list[dict[str, Any]] = []
    for place, point in enumerate(points):
        head = {"study": "fig8", "scenario": "scenes", "key": f"fig8-{place}", "label.rung": point.title}
        head |= {"scenario.title": _SCENARIO.title, "scenario.role": _SCENARIO.role.value} | flatten(_config(point, seeds))
        head |= {"role.rung": point.role} if point.role else {}
        steps = [step for step in STEPS if step <= point.law.until]
        rows += [head | _weights(point, step, seed, "model") for seed in range(seeds) for step in steps]
    return pd.DataFrame(rows).drop(columns="seeds")


def _config(point: Trained, seeds: int) -> dict[str, Any]:
    rung = {"type": "Rung", "attention": VANILLA, "numerics": "autocast_bf16", "init": 0, "order": 0, "ulp": 0, "ranks": 1}
    rung |= {"restart": "none", "repeat": 0, "rate": 1.0, "noise": None}
    config = {"problem": {"type": "TextToImage", "steps": STEPS[-1]}, "variant": rung | dict(point.rung), "seeds": seeds}
    against = EXACT if point.label.startswith("from_exact") else VANILLA
    return config | {"baseline": rung | {"numerics": point.against, "attention": against}}


def record(key: str, point: Trained, seeds: int) -> Record:
    steps = [step for step in STEPS if step <= point.law.until]
    weights = [_weights(point, step, seed, tensor) for seed in range(seeds) for step in steps for tensor in ("model", "a")]
    tables = {
        "weights": weights,
        "loss": [_loss(point, step, seed) for seed in range(seeds) for step in range(0, point.law.until, 4)],
        "run": [_run(point, seed) for seed in range(seeds)],
    }
    environment = {"device": "cpu", "processor": "a CPU", "numdev": "0"}
    how = ("training", "training", ("weights",), TABLES, _config(point, seeds), environment)
    return Record(key, *how, Status.OK, "", tables, 12.0)


def _weights(point: Trained, step: int, seed: int, tensor: str) -> dict[str, Any]:
    value = point.law.at(step, seed, point.label)
    row: dict[str, Any] = {"seed": seed, "step": step, "tensor": tensor} | {name: SHAPE[name] * value for name in METRICS}
    return row | {"cosine": 1 - value, "change_cosine": 1 - 10 * value}


def _loss(point: Trained, step: int, seed: int) -> dict[str, Any]:
    noise = np.random.default_rng(1000 * seed + step)
    base = 0.1 + 0.9 * np.exp(-step / 60) * (1 + 0.1 * noise.standard_normal())
    own = base * (1 + 100 * point.law.at(step, seed, point.label) * noise.standard_normal())
    return {"seed": seed, "step": step, "loss": own, "baseline_loss": base, "gradient_norm": 1.0, "baseline_gradient_norm": 1.0}


def _run(point: Trained, seed: int) -> dict[str, Any]:
    stopped = "" if point.law.until == STEPS[-1] else f"the loss is not finite at step {point.law.until}"
    row = {"held_out_loss": 0.131 + 0.001 * seed, "score": 0.8, "seconds_per_step": 0.1, "checksum": "a"}
    theirs = {"held_out_loss": 0.13 + 0.001 * seed, "score": 0.81, "seconds_per_step": 0.1, "checksum": "b"}
    own: dict[str, Any] = row | {f"baseline_{name}": value for name, value in theirs.items()}
    own |= {"seed": seed, "steps_done": point.law.until, "untrained_loss": 1.02, "parameters": 850_000, "stopped": stopped}
    own |= {"same_bits": int(point.law.end == 0), "samples": "", "calls": 8 * point.law.until, "missed": 0, "notes": ""}
    return {column.name: own[column.name] for column in TABLES["run"]}
