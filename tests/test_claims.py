from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd
import pytest

from numdev.report.claims import CLAIMS, ClaimResult, judge, unknown
from numdev.report.finding import Finding, Verdict
from numdev.report.frames import Results, load
from numdev.report.published import FA3_RMSE
from numdev.store import Store

HOLDS, FAILS, UNDECIDED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED
SEEDS = 5
FORMATS = {"bf16": 1e-2, "fp16": 1e-3, "fp32": 1e-7, "fp64": 1e-16}


def replicates(value: float, noise: float = 0.02, **columns: Any) -> list[dict[str, Any]]:
    """Rows of one point: `value` for every metric, times factors within `noise` of 1, in another order at each point."""
    draws = np.random.default_rng(crc32(f"{value} {columns}".encode()))
    row: dict[str, Any] = {"setting": "uniform_end", "key": "k", "format": "bf16", "policy": "uniform", "subject": "variant"}
    row |= {"pairing": "p", "output": "out", "reference": "baseline", "nan_count": 0, "inf_count": 0}
    metrics = ("max_difference", "mean_absolute", "std", "rmse")
    shifts = draws.permutation(np.linspace(-noise, noise, SEEDS))
    return [row | columns | {"seed": i} | dict.fromkeys(metrics, value * (1 + shifts[i])) for i in range(SEEDS)]


def table(points: Iterable[list[dict[str, Any]]]) -> pd.DataFrame:
    return pd.DataFrame([row for point in points for row in point])


def formats(values: Iterable[float], noise: float = 0.02) -> pd.DataFrame:
    return table(replicates(v, noise, format=f) for f, v in zip(FORMATS, values, strict=True))


def against_golden(times: float, noise: float = 0.02, **columns: Any) -> list[list[dict[str, Any]]]:
    """The variant `times` as far from golden as the baseline."""
    references = ("golden", "golden_same_inputs")
    variant = [replicates(times, noise, reference=r, **columns) for r in references]
    return variant + [replicates(1.0, 0.0, reference=r, subject="baseline", **columns) for r in references]


def lengths(exponent: float, noise: float = 0.02) -> pd.DataFrame:
    return table(replicates(n**exponent, noise, **{"problem.shape.keys": n}) for n in (128, 256, 512, 1024))


def areas(exponent: float, noise: float = 0.02) -> pd.DataFrame:
    return lengths(exponent, noise).rename(columns={"problem.shape.keys": "tiling.area"})


def shapes(other: str, times: float, noise: float = 0.02, bc: int = 32) -> pd.DataFrame:
    """Another shape of the tile, with `times` the difference, at two SRAM sizes."""
    points = []
    for sram in (1024, 2048):
        place = {"label.tiling.sram": sram, "variant.tiling.br": 16}
        points.append(replicates(1.0, 0.0, **place, **{"label.tiling.shape": "as_is", "variant.tiling.bc": 64}))
        points.append(replicates(times, noise, **place, **{"label.tiling.shape": other, "variant.tiling.bc": bc}))
    return table(points)


def methods(factor: float = 1.0, swap: bool = False, noise: float = 0.002) -> pd.DataFrame:
    """Table 3, every figure `factor` times the published one; with `swap` no quantisation by block is the best."""
    values = dict(FA3_RMSE)
    if swap:
        values["fp8_fa3"], values["fp8_fa3_no_block"] = values["fp8_fa3_no_block"], values["fp8_fa3"]
    return table(replicates(factor * v, noise, setting=m, reference="golden") for m, v in values.items())


def policies(uniform: float, kernel: float, noise: float = 0.02) -> pd.DataFrame:
    both = (("uniform", uniform), ("kernel", kernel))
    return table(rows for policy, times in both for rows in against_golden(times, noise, policy=policy, key=policy))


def predicted(distance: float, size: float, noise: float = 0.02, control: float = 0.9) -> pd.DataFrame:
    """A kernel, `distance` of the emulation's error away from it, with `size` times its error; and the control."""
    points = []
    for name, apart, error in (("exact_rounded", control, 1.0), ("fast", distance, size)):
        label = {"label.kernel": name, "key": name, "max_u": 1.0, "equal_share": 0.9}
        points += [replicates(1.0, 0.0, reference=r, subject="baseline", **label) for r in ("golden", "golden_same_inputs")]
        points += [replicates(apart, noise, **label), replicates(error, noise, reference="golden", **label)]
    return table(points)


def beside_policies(fast: float, uniform: float = 10.0, noise: float = 0.02) -> pd.DataFrame:
    """A kernel between `kernel(F)`, whose RMSE is 1, and `uniform(F)`."""
    values = {"uniform_bf16": uniform, "kernel_bf16": 1.0, "sdpa_math": 5.0, "fast": fast}
    return table(replicates(v, noise, reference="golden", **{"label.kernel": name}) for name, v in values.items())


CASES: list[tuple[str, Callable[[], pd.DataFrame], Verdict]] = [
    ("long", lambda: lengths(0.5).assign(reference="golden"), HOLDS),
    ("long", lambda: lengths(0.0).assign(reference="golden"), FAILS),
    ("long", lambda: lengths(-0.5).assign(reference="golden"), FAILS),
    ("long", lambda: lengths(0.5), UNDECIDED),  # golden alone says how far a kernel strays
    ("validate", lambda: predicted(0.1, 1.0), HOLDS),
    ("validate", lambda: predicted(0.0, 1.0, noise=0.0), HOLDS),  # to the bit
    ("validate", lambda: predicted(1.5, 1.0), FAILS),
    ("validate", lambda: predicted(0.1, 1.3), FAILS),
    ("validate", lambda: predicted(0.1, 0.7), FAILS),
    ("validate", lambda: predicted(0.7, 1.0), UNDECIDED),
    ("validate", lambda: predicted(0.1, 1.08, noise=0.3), UNDECIDED),
    ("validate", lambda: predicted(0.4, 1.0, control=0.3), FAILS),  # farther from the emulation than what has no such errors
    ("validate", lambda: predicted(0.3, 1.0, control=0.3), UNDECIDED),
    ("validate", lambda: predicted(0.1, 1.0).query("`label.kernel` != 'exact_rounded'"), UNDECIDED),
    ("validate", lambda: predicted(0.1, 1.0).query("`label.kernel` == 'exact_rounded'"), UNDECIDED),
    ("validate", lambda: predicted(0.1, 1.0).drop(columns="label.kernel"), UNDECIDED),
    ("kernels", lambda: beside_policies(1.1), HOLDS),
    ("kernels", lambda: beside_policies(9.0), FAILS),
    ("kernels", lambda: beside_policies(0.5), FAILS),
    ("kernels", lambda: beside_policies(1.0, uniform=1.0), UNDECIDED),  # the policies cannot be told apart
    ("kernels", lambda: beside_policies(1.2, noise=0.4), UNDECIDED),
    ("kernels", lambda: beside_policies(1.0).query("`label.kernel` != 'fast'"), UNDECIDED),
    ("fig3", lambda: formats(FORMATS.values()), HOLDS),
    ("fig3", lambda: formats((1e-2, 1e-3, 1e-16, 1e-7)), FAILS),
    ("fig3", lambda: formats((1e-2, 1e-3, 0.0, 0.0)), FAILS),  # equal is not falling
    ("fig3", lambda: formats((1.1, 1.0, 1e-3, 1e-6), noise=0.5), UNDECIDED),
    ("fig3", lambda: formats(FORMATS.values()).query("format != 'fp32'"), UNDECIDED),
    ("fig4", lambda: table(against_golden(9.0)), HOLDS),
    ("fig4", lambda: table(against_golden(2.0)), FAILS),
    ("fig4", lambda: table(against_golden(30.0)), FAILS),
    ("fig4", lambda: table(against_golden(5.0, noise=0.3)), UNDECIDED),
    ("fig4", lambda: table(against_golden(9.0, format="fp16")), UNDECIDED),
    ("fig5a", lambda: lengths(0.5), HOLDS),
    ("fig5a", lambda: lengths(-0.2), FAILS),
    ("fig5a", lambda: lengths(0.0, noise=0.0), FAILS),
    ("fig5a", lambda: lengths(0.1, noise=0.9), UNDECIDED),
    ("fig5a", lambda: lengths(0.5).query("`problem.shape.keys` == 128"), UNDECIDED),
    ("fig5b", lambda: lengths(0.5), HOLDS),
    ("fig5b", lambda: lengths(0.5).assign(std=1.0), FAILS),
    ("fig5b", lambda: lengths(0.1, noise=0.9), UNDECIDED),
    ("fig6a", lambda: shapes("swapped", 1.4), HOLDS),
    ("fig6a", lambda: shapes("swapped", 0.8), FAILS),
    ("fig6a", lambda: shapes("swapped", 1.0, noise=0.0), FAILS),
    ("fig6a", lambda: shapes("swapped", 1.1, noise=0.4), UNDECIDED),
    ("fig6a", lambda: shapes("other", 1.4), UNDECIDED),
    ("fig6b", lambda: shapes("square", 1.0, noise=0.0), HOLDS),
    ("fig6b", lambda: shapes("square", 1.01, noise=0.05), HOLDS),
    ("fig6b", lambda: shapes("square", 1.3), FAILS),
    ("fig6b", lambda: shapes("square", 1.0, noise=0.9), UNDECIDED),  # too wide to call anything alike
    ("fig6b", lambda: shapes("square", 1.0, bc=64), UNDECIDED),  # every tile is the paper's own
    ("fig6c", lambda: areas(-0.3), HOLDS),
    ("fig6c", lambda: areas(0.2), FAILS),
    ("fig6c", lambda: areas(0.0, noise=0.0), FAILS),
    ("fig6c", lambda: areas(-0.1, noise=0.9), UNDECIDED),
    ("fa3_table3", lambda: methods(1.2), HOLDS),
    ("fa3_table3", lambda: methods(2.0), FAILS),
    ("fa3_table3", lambda: methods(1.0, swap=True), FAILS),
    ("fa3_table3", lambda: methods(1.48, noise=0.1), UNDECIDED),  # the interval holds 1.5
    ("fa3_table3", lambda: methods().query("setting != 'fp8_fa3'"), UNDECIDED),
    ("sign", lambda: policies(8.0, 0.5), HOLDS),
    ("sign", lambda: policies(8.0, 2.0), FAILS),
    ("sign", lambda: policies(0.7, 0.5), FAILS),
    ("sign", lambda: policies(8.0, 1.0, noise=0.4), UNDECIDED),
    ("sign", lambda: policies(8.0, 0.5).query("policy == 'uniform'"), UNDECIDED),
]


def test_policies_are_paired_by_problem() -> None:
    """A kernel as far from golden as `kernel(F)` in each of two problems, which differ by a factor of 1000."""
    both = [beside_policies(1.0, noise=1e-3).assign(pairing="near"), beside_policies(1.0, noise=1e-3).assign(pairing="far")]
    both[1]["rmse"] *= 1000
    assert CLAIMS["kernels"].test(pd.concat(both)).verdict is HOLDS


@pytest.mark.parametrize(("name", "rows", "verdict"), CASES, ids=[f"{c[0]}-{c[2].value}-{i}" for i, c in enumerate(CASES)])
def test_verdict(name: str, rows: Callable[[], pd.DataFrame], verdict: Verdict) -> None:
    finding = CLAIMS[name].find(_padded(rows()))
    assert finding.verdict is verdict, finding
    assert finding.sentence.endswith(".")
    assert finding.sentence[0].isupper()


def _padded(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns that `load` always gives."""
    missing = [name for name in ("problem.shape.keys", "tiling.area") if name not in rows]
    return rows.assign(**dict.fromkeys(missing, 64))


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_can_come_out_each_way(name: str) -> None:
    assert {verdict for claim, _, verdict in CASES if claim == name} == set(Verdict)


@pytest.mark.parametrize("name", CLAIMS)
def test_nothing_measured_decides_nothing(name: str) -> None:
    empty = _padded(table(against_golden(9.0))).iloc[:0]
    finding = CLAIMS[name].find(empty)
    assert (finding.verdict, finding.figure) == (UNDECIDED, "unknown")


@pytest.mark.parametrize("column", ["nan_count", "inf_count"])
def test_a_nan_is_never_averaged_away(column: str) -> None:
    rows = _padded(formats(FORMATS.values()))
    rows.loc[3, column] = 1
    finding = CLAIMS["fig3"].find(rows)
    assert finding.verdict is UNDECIDED
    assert finding.sentence == "1 of 5 replicates hold NaN or infinite values."


def test_one_replicate_decides_nothing() -> None:
    rows = _padded(table(against_golden(9.0, noise=0.0)).query("seed == 0"))
    finding = CLAIMS["fig4"].find(rows)
    assert (finding.verdict, finding.figure) == (UNDECIDED, "9.0 (one replicate)")


def test_other_formats_are_told_beside_bf16() -> None:
    bf16, fp64 = lengths(0.5), lengths(-0.5).assign(format="fp64")
    finding = CLAIMS["fig5a"].find(pd.concat([bf16, fp64]))
    assert finding.verdict is HOLDS
    assert finding.figure.startswith("N^0.50")
    assert "Other formats: fp64 fails, N^-0.50" in finding.sentence


def test_the_narrowest_format_stands_for_bf16_where_that_is_missing() -> None:
    assert CLAIMS["fig5a"].find(lengths(0.5).assign(format="fp16")).sentence.startswith("At fp16: ")


def test_equal_bits_are_told() -> None:
    finding = CLAIMS["fig6b"].find(shapes("square", 1.0, noise=0.0))
    assert "exactly equal in all 10 pairs" in finding.sentence


def test_squares_that_keep_bc_are_told_beside_the_verdict() -> None:
    kept = shapes("square_bc", 1.0, noise=0.0, bc=64).assign(**{"variant.tiling.br": 64})
    kept.loc[kept["label.tiling.shape"] == "as_is", "variant.tiling.br"] = 16
    rows = pd.concat([shapes("square", 1.3), kept.query("`label.tiling.shape` == 'square_bc'")])
    finding = CLAIMS["fig6b"].find(rows)
    assert finding.verdict is FAILS
    assert "Squares that keep Bc make it 1.00 in every replicate times as large" in finding.sentence


def test_zero_deviations_are_counted() -> None:
    rows = lengths(0.5)
    rows.loc[rows["seed"] == 0, "max_difference"] = 0.0
    assert "Left out because a deviation is zero: 4." in CLAIMS["fig5a"].find(rows).sentence


def test_swapped_tiles_are_paired_by_size_and_seed() -> None:
    rows = shapes("swapped", 1.5, noise=0.0)
    spread = rows["seed"].map(lambda seed: 10.0**seed)  # far larger than the effect, and the same for both of a pair
    rows["max_difference"] *= spread
    assert CLAIMS["fig6a"].find(rows).figure == "1.50 in every replicate"


def _result(**verdicts: Verdict) -> ClaimResult:
    findings = {name: Finding(verdict, f"{i}", "") for i, (name, verdict) in enumerate(verdicts.items())}
    return ClaimResult(CLAIMS["fig4"], "fig4", findings)


@pytest.mark.parametrize(
    ("result", "overall"),
    [
        (_result(uniform_end=HOLDS, normal_end=HOLDS), "reproduced"),
        (_result(uniform_end=FAILS, normal_end=FAILS), "not reproduced"),
        (_result(uniform_end=UNDECIDED), "undecided"),
        (
            _result(uniform_end=FAILS, normal_end=UNDECIDED),
            "not reproduced in the paper's settings; undecided when normal_end (1)",
        ),
        (
            _result(uniform_end=UNDECIDED, normal_end=FAILS),
            "undecided in the paper's settings; fails when normal_end (1)",
        ),
        (
            _result(uniform_end=HOLDS, normal_end=FAILS, captured_end=UNDECIDED, kernel_uniform=HOLDS),
            "reproduced in the paper's settings; holds when kernel_uniform (3); fails when normal_end (1); "
            "undecided when captured_end (2)",
        ),
        (
            _result(uniform_each=HOLDS, uniform_end=FAILS, normal_end=HOLDS),
            "partly reproduced; holds when uniform_each (0), normal_end (2); fails when uniform_end (1)",
        ),
        (
            _result(uniform_each=UNDECIDED, uniform_end=FAILS),
            "not reproduced; fails when uniform_end (1); undecided when uniform_each (0)",
        ),
    ],
)
def test_overall_verdict(result: ClaimResult, overall: str) -> None:
    assert result.overall == overall


def test_the_papers_settings_come_first() -> None:
    rows = pd.concat([lengths(0.5).assign(setting=name) for name in ("normal_end", "uniform_each", "kernel_uniform")])
    points = [{"key": name, "setting": name, "labels": {}} for name in rows["setting"].unique()]
    points.append({"key": "never", "setting": "captured_end", "labels": {}})
    manifest = {"name": "s", "title": "", "figure": None, "claims": ["fig5a", "mine"], "points": points}
    results = Results(rows.assign(study="s"), pd.DataFrame(), {"s": manifest})
    (found,) = judge(results)
    assert list(found.findings) == ["uniform_each", "normal_end", "kernel_uniform", "captured_end"]
    assert (found.main, found.papers) == ("uniform_each", ["uniform_each"])
    assert found.findings["captured_end"].verdict is UNDECIDED
    assert unknown(results.manifests) == [f"s: there is no claim mine; there are {', '.join(CLAIMS)}"]


def test_table_3_is_judged_once_over_its_methods() -> None:
    rows = methods().assign(study="fa3")
    points = [{"key": name, "setting": name, "labels": {}} for name in FA3_RMSE]
    manifest = {"name": "fa3", "title": "", "figure": None, "claims": ["fa3_table3"], "points": points}
    (found,) = judge(Results(rows, pd.DataFrame(), {"fa3": manifest}))
    assert list(found.findings) == ["fa3"]
    assert found.overall == "reproduced"


def test_every_claim_is_judged_on_the_studies_of_the_paper(toy_results: Store) -> None:
    found = {result.claim.name: result for result in judge(load(toy_results))}
    assert list(found) == list(CLAIMS)
    assert found["fig3"].findings["uniform_end"].verdict is HOLDS
    assert found["fig5b"].study == "fig5"
