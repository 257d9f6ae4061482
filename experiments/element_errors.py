"""The error of every element of one head, as a map and as a distribution, under the policies that part.

Run: `python experiments/element_errors.py [--out reports/elements]`, from a checkout. N = 2048, d = 64, uniform inputs, tiles of
64 x 64, BF16: every step in the format, and FP32 inside. Writes each figure as PNG and SVG, and elements.csv with the share of
elements within half an ulp of golden, and the share of the mean square error that is one factor per row.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

import numdev as nd
from numdev.attention.operation import ATTENTION
from numdev.measurement.deviation import Place, head_of
from numdev.report.document.export import to_csv
from numdev.report.figures.elements import element_errors, write_errors
from numdev.results.record import write_atomically

POLICIES = {"uniform_bf16": "every step in BF16", "kernel_bf16": "FP32 inside, as kernels have it"}
PROBLEM = nd.Problem(nd.Distribution(nd.Kind.UNIFORM), nd.Shape(queries=2048, keys=2048, head_dim=64))


def elements(policy: str) -> pd.DataFrame:
    """Of one head, from golden on the unrounded inputs."""
    attention = nd.Tiled(nd.Precision.parse(policy), nd.Tiling(64, 64))
    head = head_of(ATTENTION, PROBLEM, attention, Place(), torch.device("cpu"))
    return element_errors(head.x, head.reference, head.fmt)


def row_share(found: pd.DataFrame) -> float:
    """The share of the mean square error that one factor per row of golden would take away."""
    products = found.assign(along=found["error"] * found["reference"], own=found["reference"] ** 2)
    sums = products.groupby("row")[["along", "own"]].sum()
    return float((sums["along"] ** 2 / sums["own"]).sum() / (found["error"] ** 2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports/elements"))
    out = parser.parse_args().out
    facts = []
    for policy, words in POLICIES.items():
        found = elements(policy)
        within = float((found["error_ulp"].abs() <= 0.5).mean())
        facts.append({"policy": policy, "within_half_ulp": within, "row_share": row_share(found)})
        write_errors(found, words, out, f"_{policy}")
    write_atomically(out / "elements.csv", to_csv(pd.DataFrame(facts)))
    print(pd.DataFrame(facts).to_string(index=False))


if __name__ == "__main__":
    main()
