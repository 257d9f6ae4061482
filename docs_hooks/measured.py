"""Tables of what was measured, from the files of the reference results."""

from __future__ import annotations

import csv
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from docs_hooks.quoted import rows_of
from docs_hooks.tables import REFERENCE, cell, escaped

_ORDER = ("holds", "fails", "undecided", "not measured")


def claims() -> Iterator[str]:
    """Every claim, and what the reference results say of it in the first scenario."""
    from numdev.report.studies.registry import CLAIMS

    folders = [path.parent for path in sorted(REFERENCE.glob("*/claims.csv"))]
    found = {folder.name: _first_findings(folder / "claims.csv") for folder in folders}
    yield "| name | claim | source | " + " | ".join(found) + " |"
    yield "|---|---|---|" + "---|" * len(found)
    for name, claim in CLAIMS.items():
        cells = [escaped(rows.get(name, "not measured")) for rows in found.values()]
        yield f"| `{name}` | {cell(claim.text)} | {cell(claim.source)} | {' | '.join(cells)} |"


def _first_findings(path: Path) -> dict[str, str]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["claim"]: f"{row['verdict']}: {row['figure']}" for row in reversed(rows)}


def paper() -> Iterator[str]:
    """Every claim of the paper on Figures 3 to 6: what was found under our assumption about its circumstances, and elsewhere."""
    with (REFERENCE / "cpu" / "claims.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"].startswith("Golden")]
    yield from ("| figure | claim | under our assumption | in other scenarios |", "|---|---|---|---|")
    for claim in dict.fromkeys(row["claim"] for row in rows):
        found = [row for row in rows if row["claim"] == claim]
        link = f"[{found[0]['source'].rpartition('Figure ')[2]}](gallery.md#cpu-{found[0]['study']})"
        assumed = (row for row in found if row["scenario.role"] in ("paper", "assumed"))
        ours = (f"**{row['verdict']}**: {escaped(row['figure'])}" for row in assumed)
        others = Counter(row["verdict"] for row in found if row["scenario.role"] == "beyond")
        counted = "<br>".join(f"**{verdict}** in {others[verdict]}" for verdict in sorted(others, key=_ORDER.index))
        yield f"| {link} | {cell(escaped(found[0]['text']))} | {cell('<br>'.join(ours))} | {counted} |"


def _rmse(folder: str, reference: str, label: str) -> dict[tuple[str, str, str, str], str]:
    """RMSE by subject, scenario, keys and label, rounded to three digits."""
    with (REFERENCE / folder / "summary.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reference"] == reference]
    return {
        (row["subject"], row["scenario"], row["label.problem.n"], row[label]): f"{float(row['rmse.mean']):.3g}" for row in rows
    }


def fp8_kernel() -> Iterator[str]:
    """The RMSE of the FP8 kernel and of its emulation, at some of the lengths."""
    found = _rmse("h200/fp8_kernel", "golden_same_inputs", "label.promotion")
    yield from ("| inputs | N | promoted | kernel | emulation |", "|---|---|---|---|---|")
    for scenario, title, n in (
        ("uniform", "V of one sign", 1024),
        ("uniform", "V of one sign", 131072),
        ("normal", "normal", 131072),
    ):
        for promotion in ("after a tile", "after 4 tiles", "after 64 tiles", "never"):
            kernel, emulation = (found[subject, scenario, str(n), promotion] for subject in ("variant", "baseline"))
            yield f"| {title} | {n:,} | {promotion} | {kernel} | {emulation} |"


def fp8_steps() -> Iterator[str]:
    """The RMSE of FP8 attention by what is in FP8, from the study `fp8`."""
    found = _rmse("cpu/fp8", "golden", "label.step")
    places = (("uniform", "1024"), ("uniform", "16384"), ("uniform", "131072"), ("normal", "131072"), ("captured", "256"))
    yield "| in FP8 | V of one sign, N = 1024 | 16,384 | 131,072 | normal inputs, 131,072 | a trained model's, 256 |"
    yield "|---|---|---|---|---|---|"
    for step in dict.fromkeys(key[3] for key in found):
        yield f"| {step} | " + " | ".join(found.get(("variant", *place, step), "") for place in places) + " |"


def mismatch(*folders: str) -> Iterator[str]:
    """The share of each operation in the variance of the difference of log-probabilities, by trainer and cache.

    Of one folder of results means with intervals; of several their medians, in their order.
    """
    from numdev.report.statistics import mean

    tables = [[row for row in rows_of(f"{folder}/mismatch/effects.csv") if row["order"] != "2"] for folder in folders]
    places = [(scenario, cache) for scenario in ("bf16", "fp32") for cache in ("BF16", "E4M3")]
    yield "| operation | " + " | ".join(f"trainer in {one.upper()}, cache in {cache}" for one, cache in places) + " |"
    yield "|---|" + "---|" * len(places)

    def share(*place: str) -> str:
        shares = [
            [100 * float(row["share"]) for row in rows if (row["scenario"], row["label.cache"], row["effect"]) == place]
            for rows in tables
        ]
        if len(shares) > 1:
            return "; ".join(f"{median(own):.1f} %" for own in shares)
        one = mean(shares[0])
        return f"{one.estimate:.1f} % [{one.low:.1f}, {one.high:.1f}]"

    for effect in dict.fromkeys(row["effect"] for row in tables[0]):
        yield f"| {effect} | " + " | ".join(share(*place, effect) for place in places) + " |"


def instrumented_speed() -> Iterator[str]:
    """What `benchmarks/instrumented.py` printed on one H200."""
    text = (REFERENCE / "h200" / "benchmarks" / "instrumented.txt").read_text()
    yield from ("| policy | instrumented, ms | over the plain portable kernel | `attention=tiled` takes |", "|---|---|---|---|")
    for row in re.findall(
        r"^(\w+): instrumented ([\d.]+) ms, ([\d.]+) times plain; Tiled [\d.]+ s, (\d+) times as long$", text, re.M
    ):
        policy, time, plain, tiled = row
        yield f"| `{policy}` | {time} | {plain} times | {tiled} times as long |"


def _benchmarks(*, limits: bool) -> list[dict[str, str]]:
    """What `benchmarks/run.py` wrote: beside the limit of tiled attention, or all else."""
    with (REFERENCE / "cpu" / "benchmarks" / "benchmarks.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["name"].startswith(("forward, ", "backward, ")) == limits]


def roofline() -> Iterator[str]:
    """How far tiled attention is from its products and one pass over the scores: `benchmarks/roofline.py`."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in _benchmarks(limits=True):
        case, _, path = row["name"].partition(": ")
        found.setdefault(case, {})[path] = row
    yield "| what | products alone, s | with the passes, s | tiled attention, s | times the limit |"
    yield "|---" * 5 + "|"
    for case, paths in found.items():
        alone, tiled = paths["products alone"], paths["tensor operations"]
        figures = [alone["seconds"], alone["other"], tiled["seconds"], tiled["ratio"]]
        yield f"| {cell(case)} | {' | '.join(f'{float(figure):.3g}' for figure in figures)} |"


def instrument_speed() -> Iterator[str]:
    """What `benchmarks/run.py` wrote: seconds and ratios beside their targets."""
    rows = _benchmarks(limits=False)
    yield from ("| what | seconds | the other, or the limit, in seconds | ratio | target | met |", "|---|---|---|---|---|---|")
    for row in rows:
        figures = (f"{float(row[name]):.3g}" for name in ("seconds", "other", "ratio"))
        is_met = "yes" if row["met"] == "True" else "**no**"
        yield f"| {cell(escaped(row['name']))} | {' | '.join(figures)} | {escaped(row['target'])} | {is_met} |"


def kernel_speed(precision: str = "") -> Iterator[str]:
    """TFLOP/s of each kernel by `benchmarks/kernels.py` on one H200, and ours over the others; of FP16 these ratios alone."""
    yield from _beside("kernels", "numdev hopper", precision)


def backward_speed(precision: str = "") -> Iterator[str]:
    """TFLOP/s of each backward pass by `benchmarks/backward.py` on one H200, in brackets over cuDNN's; of FP16 ratios alone."""
    yield from _beside("backward", "fused", precision)


def _beside(file: str, ours: str, precision: str) -> Iterator[str]:
    """A table of kernels on problems, and the geometric mean and the least of the ratios of one of them to each other one."""
    name = "_".join(filter(None, (file, precision)))
    command, device, *lines = (REFERENCE / "h200" / "benchmarks" / f"{name}.txt").read_text().splitlines()
    where = f"`{command.removeprefix('# ')}`, {device.removesuffix(' TFLOP/s')}"
    place = re.compile(r"(d +(\d+) (\w+) +N +(\d+)(?: heads +([\d/ ]+\d))?) ")
    rows = {m.groups("")[1:]: line[m.end() :].partition(" largest error")[0] for line in lines if (m := place.match(line))}
    figure = re.compile(r"((?:sdpa |numdev )?(?<!/)\b[a-z]\w*) +(\d+(?: \([\d.]+\))?)(?= |$)")
    found = {problem: dict(figure.findall(row)) for problem, row in rows.items()}
    names = list(next(iter(found.values())))
    if not precision:
        yield from (f"{where}:", "")
        yield from (f"| d | mask | N | heads | {' | '.join(names)} |", "|---" * (len(names) + 4) + "|")
        for problem, rates in found.items():
            yield f"| {' | '.join(problem)} | {' | '.join(rates.get(name, '') for name in names)} |"
    means = []
    for name in names:
        ratios = [int(rates[ours].split()[0]) / int(rates[name].split()[0]) for rates in found.values() if name in rates]
        means += [f"{name} {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}"] if name != ours else []
    title = f"{precision.upper()}, {where}: " if precision else ""
    yield from ("", f"{title}`{ours}` over the others, geometric mean and least: {'; '.join(means)}.")


def decode_speed(file: str = "decode", ours: str = "numdev auto", other: str = "sdpa cudnn") -> Iterator[str]:
    """Yield the GB/s of ours and of another by `benchmarks/decode.py` on one H200, and how many times as fast ours is."""
    command, device, *lines = (REFERENCE / "h200" / "benchmarks" / f"{file}.txt").read_text().splitlines()
    yield from (f"`{command.removeprefix('# ')}`, {device.removesuffix(' GB/s')}:", "")
    found: dict[tuple[str, str], dict[str, str]] = {}
    ratios: dict[str, list[float]] = {}
    for line in lines[:-1]:
        queries, batch, keys = re.findall(r"queries +(\d+) batch +(\d+) keys +(\d+)", line)[0]
        rates = dict(re.findall(rf"({ours}|{other}) +(\d+)", line))
        (ratio,) = re.findall(r"\w+/\w+ ([\d.]+)", line)
        ratios.setdefault(queries, []).append(float(ratio))
        found.setdefault((queries, batch), {})[keys] = f"{rates[ours]} ({rates[other]}), {float(ratio):.2f}"
    lengths = next(iter(found.values()))
    yield f"| queries | sequences | {' | '.join(f'{int(keys):,} keys' for keys in lengths)} |"
    yield "|---" * (len(lengths) + 2) + "|"
    for place, cells in found.items():
        yield f"| {' | '.join((*place, *cells.values()))} |"
    means = (f"{statistics.geometric_mean(own):.2f} with {queries}" for queries, own in ratios.items())
    yield from ("", f"Geometric means of the ratio, by queries: {', '.join(means)}.")


def certified(study: str = "certified") -> Iterator[str]:
    """What the certificates of a study say of each kernel."""
    with (REFERENCE / "h200" / "certified" / "summary.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["study"] == study]
    named = ("kernel", "F", "d", "verdict", "score", "tiles", "equal", "nearest", "fails on")
    shown = [name for name in named if study == "certified" or name not in ("tiles", "equal")]
    yield from (f"| {' | '.join(shown)} |", "|---" * len(shown) + "|")
    for row in sorted(rows, key=lambda row: [row["label.precision"], int(row["label.problem.head_dim"]), row["label.kernel"]]):
        nearest = re.sub(r" or .* or [^(]*", " or others ", re.sub("^(computes as|errs as with) ", "", row["computes"]))
        nearest = re.sub("^errs (as permitted, and as|in a way that) no candidate (does|explains)", "no candidate", nearest)
        cells = {
            "kernel": escaped(row["label.kernel"]),
            "F": row["label.precision"],
            "d": row["label.problem.head_dim"],
            "verdict": row["verdict"].upper(),
            "score": f"{float(row['score.mean']):.3f}",
            "tiles": row["tiles"].removeprefix("tiles of "),
            "equal": f"{100 * float(row['equal.mean']):.2f} %" if row["equal.mean"] else "",
            "nearest": cell(escaped(nearest)) if study == "certified" or _errs(row["fails"]) else "",
            "fails on": escaped(row["fails"]),
        }
        yield f"| {' | '.join(cells[name] for name in shown)} |"


def certified_backward() -> Iterator[str]:
    """What the certificates of gradients say; where only probes fail, or none, no candidate has to explain an error."""
    return certified("certified_backward")


def _errs(fails: str) -> bool:
    from numdev.certification.accuracy import CASES

    return any(case.name in fails.split(", ") for case in CASES)
