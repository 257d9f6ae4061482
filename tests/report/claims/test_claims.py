from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd
import pytest

from numdev.measurement.metrics import NONFINITE
from numdev.report.claims import verdicts
from numdev.report.claims.verdicts import ClaimResult, Finding, Verdict, note
from numdev.report.reading.frames import Results, Rows, load
from numdev.report.studies import registry
from numdev.report.studies.kernels import FA3_RMSE
from numdev.results.store import Role, Scenario, Store

FORWARD = [one for one in registry.CHAPTERS if one.operation == "attention" and one.study != "attribution_forward"]
CLAIMS = {claim.name: claim for chapter in FORWARD for claim in chapter.claims}  # for the others see test_backward.py
HOLDS, FAILS, UNDECIDED, NOT_MEASURED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED, Verdict.NOT_MEASURED
SEEDS = 5
judge, unknown = partial(verdicts.judge, CLAIMS), partial(verdicts.unknown, CLAIMS)
FORMATS = {"bf16": 1e-2, "fp16": 1e-3, "fp32": 1e-7, "fp64": 1e-16}


def replicates(value: float, noise: float = 0.02, **columns: Any) -> list[dict[str, Any]]:
    """Rows of one point: `value` for every metric, times factors within `noise` of 1, in another order at each point."""
    draws = np.random.default_rng(crc32(f"{value} {columns}".encode()))
    row: dict[str, Any] = {"scenario": "uniform_end", "scenario.title": "uniform inputs", "scenario.role": "assumed"}
    row |= {"cluster": "", "key": "k", "format": "bf16", "policy": "uniform", "subject": "variant"}
    row |= {"pairing": "p", "output": "out", "primary": True, "reference": "baseline"} | dict.fromkeys(NONFINITE, 0)
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
    return table(replicates(n**exponent, noise, **{"problem.shape.keys": n, "label.problem.n": n}) for n in (128, 256, 512, 1024))


def ratios(exponent: float, at_1024: float = 10.0, noise: float = 0.02) -> pd.DataFrame:
    """The variant over the baseline goes as N to the exponent."""
    lengths = (512, 1024, 2048)
    values = {n: at_1024 * (n / 1024) ** exponent for n in lengths}
    return table(row for n in lengths for row in against_golden(values[n], noise, key=str(n), **{"label.problem.n": n}))


def areas(exponent: float, noise: float = 0.02) -> pd.DataFrame:
    return lengths(exponent, noise).rename(columns={"problem.shape.keys": "tiling.area"})


def shapes(other: str, times: float, noise: float = 0.02, bc: int = 32) -> pd.DataFrame:
    """Another shape of the tile, with `times` the difference, at two SRAM sizes."""
    points = []
    for sram in (1024, 2048):
        place = {"label.tiling.sram": sram, "variant.tiling.br": 16}
        tile = {"label.tiling.shape": other, "variant.tiling.bc": bc, "key": f"{sram} {bc} {other if bc == 32 else ''}"}
        as_is = {"label.tiling.shape": "as_is", "variant.tiling.bc": 64, "key": f"{sram} 64 "}
        points += [replicates(1.0, 0.0, **place, **as_is), replicates(times, noise, **place, **tile)]
    return table(points)


def methods(factor: float = 1.0, swap: bool = False, noise: float = 0.002) -> pd.DataFrame:
    """Table 3, every figure `factor` times the published one; with `swap` no quantisation by block is the best."""
    values = dict(FA3_RMSE)
    if swap:
        first, second = "FP8 FlashAttention-3", "FP8 FA3, no block quantisation"
        values[first], values[second] = values[second], values[first]
    return table(
        replicates(factor * v, noise, scenario=f"s{place}", reference="golden", **{"scenario.stands_for": row})
        for place, (row, v) in enumerate(values.items())
    )


def policies(uniform: float, kernel: float, noise: float = 0.02) -> pd.DataFrame:
    both = (("uniform", uniform), ("kernel", kernel))
    return table(rows for policy, times in both for rows in against_golden(times, noise, policy=policy, key=policy))


def predicted(distance: float, size: float, noise: float = 0.02, control: float = 0.9) -> pd.DataFrame:
    """A kernel, `distance` of the emulation's error away from it, with `size` times its error; and the control."""
    points = []
    for name, apart, error in (("rounded", control, 1.0), ("fast", distance, size)):
        label = {"label.kernel": name, "key": name, "max_u": 1.0, "equal_share": 0.9}
        label |= {"role.kernel": "control"} if name == "rounded" else {}
        points += [replicates(1.0, 0.0, reference=r, subject="baseline", **label) for r in ("golden", "golden_same_inputs")]
        points += [replicates(apart, noise, **label), replicates(error, noise, reference="golden", **label)]
    return table(points)


def beside_policies(fast: float, uniform: float = 10.0, noise: float = 0.02) -> pd.DataFrame:
    """A kernel between `kernel(F)`, whose RMSE is 1, and `uniform(F)`."""
    values = {"strict": (uniform, "control"), "like": (1.0, "expected"), "beside": (5.0, "aside"), "fast": (fast, None)}
    return table(
        replicates(v, noise, reference="golden", **{"label.kernel": name, "role.kernel": role})
        for name, (v, role) in values.items()
    )


CASES: list[tuple[str, Callable[[], pd.DataFrame], Verdict]] = [
    ("long", lambda: lengths(0.5).assign(reference="golden"), HOLDS),
    ("long", lambda: lengths(0.0).assign(reference="golden"), FAILS),
    ("long", lambda: lengths(0.5), UNDECIDED),  # golden alone says how far a kernel strays
    ("validate", lambda: predicted(0.1, 1.0), HOLDS),
    ("validate", lambda: predicted(0.0, 1.0, noise=0.0), UNDECIDED),  # to the bit, in five replicates: of others, 45 % may differ
    ("validate", lambda: predicted(1.5, 1.0), FAILS),
    ("validate", lambda: predicted(0.1, 1.3), FAILS),
    ("validate", lambda: predicted(0.7, 1.0), FAILS),  # not most of it
    ("validate", lambda: predicted(0.5, 1.0), UNDECIDED),
    ("validate", lambda: predicted(0.1, 1.08, noise=0.3), UNDECIDED),
    ("validate", lambda: predicted(0.4, 1.0, control=0.3), FAILS),  # farther from the emulation than what has no such errors
    ("validate", lambda: predicted(0.3, 1.0, control=0.3), UNDECIDED),
    ("validate", lambda: predicted(0.1, 1.0).query("`label.kernel` != 'rounded'"), UNDECIDED),
    ("validate", lambda: predicted(0.1, 1.0).query("`label.kernel` == 'rounded'"), UNDECIDED),
    ("validate", lambda: predicted(0.1, 1.0).drop(columns="label.kernel"), UNDECIDED),
    ("kernels", lambda: beside_policies(1.1), HOLDS),
    ("kernels", lambda: beside_policies(9.0), FAILS),
    ("kernels", lambda: beside_policies(1.0, uniform=1.0), UNDECIDED),  # the policies cannot be told apart
    ("kernels", lambda: beside_policies(1.0).query("`label.kernel` != 'fast'"), UNDECIDED),
    ("kernels", lambda: beside_policies(1.0).query("`label.kernel` != 'like'"), UNDECIDED),
    ("kernels", lambda: beside_policies(1.0).drop(columns="role.kernel"), UNDECIDED),  # no roles declared
    ("fig3", lambda: formats(FORMATS.values()), HOLDS),
    ("fig3", lambda: formats((1e-2, 1e-3, 1e-16, 1e-7)), FAILS),
    ("fig3", lambda: formats((1e-2, 1e-3, 0.0, 0.0)), UNDECIDED),  # equal is not falling, in five replicates
    ("fig3", lambda: formats(FORMATS.values()).query("format != 'fp32'"), NOT_MEASURED),
    ("fig4", lambda: table(against_golden(9.0)), HOLDS),
    ("fig4", lambda: table(against_golden(2.0)), FAILS),
    ("fig4", lambda: table(against_golden(9.0, format="fp16")), NOT_MEASURED),
    ("fig4_assumptions", lambda: ratios(0.0), HOLDS),
    ("fig4_assumptions", lambda: ratios(0.5), FAILS),
    ("fig4_assumptions", lambda: ratios(0.0, at_1024=2.0), FAILS),
    ("fig5a", lambda: lengths(0.5), HOLDS),
    ("fig5a", lambda: lengths(0.03, noise=0.005), FAILS),  # significant, and no growth
    ("fig5a", lambda: lengths(0.0, noise=0.0), UNDECIDED),  # equal in five replicates
    ("fig5b", lambda: lengths(0.5), HOLDS),
    ("fig5b", lambda: pd.concat([lengths(0.5).drop(columns="std"), lengths(0.0)[["std"]]], axis=1), FAILS),
    ("fig6a", lambda: shapes("swapped", 1.4), HOLDS),
    ("fig6a", lambda: shapes("swapped", 0.8), FAILS),
    ("fig6a", lambda: shapes("other", 1.4), NOT_MEASURED),
    ("fig6b", lambda: shapes("square", 1.01, noise=0.05), HOLDS),
    ("fig6b", lambda: shapes("square", 1.002, noise=0.001), HOLDS),  # significant, and no difference
    ("fig6b", lambda: shapes("square", 1.3), FAILS),
    ("fig6b", lambda: shapes("square", 1.0, noise=0.9), UNDECIDED),  # too wide to call anything alike
    ("fig6b", lambda: shapes("square", 1.0, bc=64), UNDECIDED),  # every tile is the paper's own
    ("fig6c", lambda: areas(-0.3), HOLDS),
    ("fig6c", lambda: areas(0.2), FAILS),
    ("fa3_table3", lambda: methods(1.2), HOLDS),
    ("fa3_table3", lambda: methods(2.0), FAILS),
    ("fa3_table3", lambda: methods(1.0, swap=True), FAILS),
    ("fa3_table3", lambda: methods(1.48, noise=0.1), UNDECIDED),  # the interval holds 1.5
    ("fa3_table3", lambda: methods(noise=0.02).query("seed < 3"), UNDECIDED),  # two are 2 % apart
    ("fa3_table3", lambda: methods().query("`scenario.stands_for` != 'FP8 FlashAttention-3'"), UNDECIDED),
    ("sign", lambda: policies(8.0, 0.5), HOLDS),
    ("sign", lambda: policies(8.0, 2.0), FAILS),
    ("sign", lambda: policies(8.0, 0.5).query("policy == 'uniform'"), NOT_MEASURED),
]


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


@pytest.mark.parametrize("name", registry.CLAIMS)
def test_nothing_measured_decides_nothing(name: str) -> None:
    """Of whatever operation a claim is."""
    finding = registry.CLAIMS[name].find(_padded(table(against_golden(9.0))).assign(study="s").iloc[:0])
    assert (finding.verdict, finding.figure or "unknown") in ((UNDECIDED, "unknown"), (NOT_MEASURED, "not measured"))


def test_the_maximum_is_judged_beside_rmse() -> None:
    """With FP32 inside the maximum is one ulp at every tile, which five replicates do not show of others; RMSE falls by 2 %."""
    rows = shapes("square", 1.0, noise=0.0).assign(max_u=1.6)
    other = rows["label.tiling.shape"] == "square"
    rows.loc[other, "rmse"] *= 0.9775 * (1 + 0.0005 * np.linspace(-1, 1, int(other.sum())))
    found = CLAIMS["fig6b"].find(rows)
    assert (found.verdict, found.figure) == (UNDECIDED, "1.00 in every replicate")
    assert "Where all 5 replicates are equal, at most 45% of others differ (95 %)." in found.sentence
    assert found.beside is not None
    assert (found.beside.verdict, found.beside.figure[:4]) == (HOLDS, "0.97")
    assert "In 100% of the replicates the maximum is one ulp of the output and sees no less." in found.sentence
    assert found.sentence.endswith(f"By RMSE: holds, {found.beside.figure}.")


def _heads(rows: pd.DataFrame, of_layer: tuple[float, float]) -> pd.DataFrame:
    """The same in a second layer, square or swapped tiles multiplied by another factor in each."""
    layers = []
    for place, (layer, factor) in enumerate(zip(("layer0", "layer5"), of_layer, strict=True)):
        own = rows.assign(cluster=layer, seed=2 * rows["seed"] + place)
        own.loc[own["label.tiling.shape"] != "as_is", ["max_difference", "rmse"]] *= factor
        layers.append(own)
    return pd.concat(layers)


@pytest.mark.parametrize(("factors", "verdict"), [((1.0, 1.0), HOLDS), ((1.3, 1.3), FAILS), ((1.0, 1.2), UNDECIDED)])
def test_layers_that_differ_are_not_averaged(factors: tuple[float, float], verdict: Verdict) -> None:
    found = CLAIMS["fig6b"].find(_heads(shapes("square", 1.0, noise=0.002), factors))
    assert found.verdict is verdict
    assert found.over == "over the heads of these 2 layers, layer0, layer5 (10 here)"
    assert "sign test" not in found.sentence, "heads of a layer are no independent trials"


ROLES = {"uniform": Role.ASSUMED, "stated": Role.PAPER, "ops": Role.CONTROL}


def _result(claim: str = "fig4", **verdicts: Verdict) -> ClaimResult:
    scenarios = [Scenario(name, f"{name} one", ROLES.get(name.partition("_")[0], Role.BEYOND)) for name in verdicts]
    found = [Finding(verdict, f"{i}", "") for i, verdict in enumerate(verdicts.values())]
    return ClaimResult(CLAIMS[claim], claim, CLAIMS[claim].source, dict(zip(scenarios, found, strict=True)))


ASSUMED = "under our assumption about the source's circumstances"


@pytest.mark.parametrize(
    ("result", "overall"),
    [
        (_result(uniform_end=HOLDS, normal_end=HOLDS), f"reproduced {ASSUMED}"),
        (_result(stated=HOLDS, normal_end=HOLDS), "reproduced"),
        (_result(stated=HOLDS, uniform=HOLDS), f"reproduced {ASSUMED}"),
        (_result(uniform_end=UNDECIDED), f"undecided {ASSUMED}"),
        (_result(uniform=HOLDS, normal=FAILS), f"reproduced {ASSUMED}. Fails with normal one (1)"),
        (_result(uniform=FAILS, normal=UNDECIDED), f"not reproduced {ASSUMED}. Undecided with normal one (1)"),
        (
            _result(uniform_each=HOLDS, uniform_end=FAILS, normal=HOLDS),
            f"partly reproduced {ASSUMED}. Holds with uniform_each one (0); normal one (2). Fails with uniform_end one (1)",
        ),
        (_result(normal=HOLDS, outliers=FAILS), "partly borne out. Holds with normal one (0). Fails with outliers one (1)"),
        (_result("kernels", normal=FAILS), "not borne out"),  # ours
        (_result("sign", uniform=HOLDS), f"borne out {ASSUMED}"),
    ],
)
def test_overall_verdict(result: ClaimResult, overall: str) -> None:
    assert result.overall == overall


def test_a_brief_verdict_counts_other_scenarios_and_all_where_no_word_covers_any() -> None:
    assert _result(uniform=FAILS, normal=UNDECIDED).brief == f"not reproduced {ASSUMED}; other scenarios: undecided in 1"
    assert _result(normal=HOLDS, outliers=FAILS).brief == "partly borne out; all scenarios: holds in 1, fails in 1"


def _manifest(name: str, claims: list[str], scenarios: dict[str, str], **more: Any) -> dict[str, Any]:
    listed = [{"name": key, "title": f"the {key} one", "role": role} for key, role in scenarios.items()]
    points = [{"key": key, "scenario": key, "labels": {}} for key in scenarios]
    head = {"name": name, "title": "A study", "figure": None, "claims": claims, "overrides": []}
    return head | {"scenarios": listed, "points": points} | more


def results_of(rows: pd.DataFrame, manifest: dict[str, Any]) -> Results:
    table = rows.assign(study=manifest["name"])
    return Results(
        Rows(pd.DataFrame(index=[0]), table, np.zeros(len(table), np.int32)), pd.DataFrame(), {manifest["name"]: manifest}
    )


def test_the_role_decides_what_comes_first_and_not_the_name() -> None:
    roles = {"uniform_end": "beyond", "strict": "control", "mine": "assumed", "never": "beyond"}
    rows = pd.concat([lengths(0.5).assign(scenario=name) for name in list(roles)[:3]])
    results = results_of(rows, _manifest("s", ["fig5a", "mine"], roles))
    (found,) = judge(results)
    assert [scenario.name for scenario in found.findings] == ["mine", "uniform_end", "never", "strict"]
    assert (found.main.name, [scenario.name for scenario in found.chief]) == ("mine", ["mine"])
    assert next(one for scenario, one in found.findings.items() if scenario.name == "never").verdict in (UNDECIDED, NOT_MEASURED)
    assert unknown(results.manifests) == [f"s: there is no claim mine; there are {', '.join(CLAIMS)}"]


def test_verdicts_of_a_table_are_adjusted_together() -> None:
    """A claim that is decided alone is not among many that nothing decides."""
    near = lengths(0.12, noise=0.013).assign(scenario="near")
    alone = _manifest("s", ["fig5a"], {"near": "assumed"})
    (found,) = judge(results_of(near, alone))
    assert found.findings[found.main].verdict is HOLDS
    assert found.questions == 2  # by the maximum and by RMSE
    names = {"near": "assumed"} | {f"open{i}": "beyond" for i in range(20)}
    rows = pd.concat([near, *(lengths(0.1, noise=0.9).assign(scenario=name) for name in list(names)[1:])])
    (among,) = judge(results_of(rows, _manifest("s", ["fig5a"], names)))
    assert among.findings[among.main].verdict is UNDECIDED
    assert among.questions == 42
    assert "all 42 questions of this table" in note([among])


def test_every_claim_is_judged_on_the_studies_of_the_paper(toy_results: Store) -> None:
    found = {result.claim.name: result for result in judge(load(toy_results))}
    assert list(found) == list(CLAIMS)
    assert found["fig3"].main.name == "uniform_end"
    assert found["fig3"].findings[found["fig3"].main].verdict is UNDECIDED, "three seeds, all with a ratio of 8, among many"
    assert found["fig5b"].study == "fig5"
