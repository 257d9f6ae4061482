"""Show that a change of structure changes no number: run commands with the code of two revisions and compare what they store.

Each command of `COMMANDS` measures toy-sized points: every study, preset, distribution, implementation and kernel (interpreted).
Run: `python experiments/same_numbers.py v1.2` compares the working tree with the revision v1.2, to the bit; with words behind it,
only the commands whose names hold one of them. Both revisions run in the environment of this Python. Exits with 1 if a number, a
row or an exit code differs; columns that only one revision has are listed.
"""

from __future__ import annotations

import os
import pickle
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_POINT = "seeds=1 device=cpu problem.n=64"
_TASK = "seeds=1 device=cpu task.steps=3 task.warmup=1 task.batch=2 task.depth=2 task.heads=2"
_LANGUAGE = f"task=language task.data.path={ROOT}/LICENSE task.length=32 task.width=32 {_TASK}"
_SCENES = f"task=scenes_small task.picture=16 task.width=24 task.sampled=2 task.euler_steps=2 {_TASK}"
_TILES = "tiling.br=16 tiling.bc=16"
_BACKWARD = f"operation=attention_backward {_POINT}"

STUDIES = ["fig3", "fig4", "fig4_assumptions", "fig5a", "fig5b", "fig6a", "fig6b", "fig6c", "sign", "delta", "attribution"]
STUDIES += ["attribution_forward", "gradients", "gradients_order"]

COMMANDS: dict[str, str] = {f"study {name}": f"measure study={name} {_POINT}" for name in STUDIES} | {
    "study table3": "measure study=fa3_table3 problem.n=128 seeds=1 device=cpu",
    "study kernels": "measure study=kernels problem.n=128 seeds=1 device=cpu",
    "study validate": f"measure study=validate problem.heads=1 {_POINT}",
    "study validate_backward": f"measure study=validate_backward problem.heads=1 {_POINT}",
    "study fig8": f"train study=fig8 out=OUT {_SCENES}",
    "study fig7": f"train study=fig7 out=OUT {_SCENES}",
    "precisions": "measure -m 'precision=glob(*)' problem=normal tiling.bc=16 " + _POINT,
    "softmaxes": "measure -m 'softmax=glob(*)' precision=kernel_bf16,fa3_fp8 problem=normal tiling.bc=16 " + _POINT,
    "tilings": "measure -m 'tiling=glob(*)' problem=normal problem.n=300 seeds=1 device=cpu",
    "orders": "measure -m tiling.order=forward,reverse,outside_in,strided,random tiling.bc=16 "
    f"precision=bf16,kernel_fp16 {_POINT}",
    "problems": f"measure -m 'problem=glob(*)' problem.causal=false,true tiling.bc=16 {_POINT}",
    "window": "measure -m problem=normal problem.causal=true problem.window=7,20 problem.heads=4 problem.kv_heads=2 "
    f"problem.batch=2 tiling.bc=16 tiling.splits=2 {_POINT}",
    "implementations": f"measure -m attention=exact,naive,tiled,vanilla,sdpa,flex precision=fp32 problem=normal {_POINT}",
    "baselines": f"measure -m baseline=eager,reference,none,uniform,emulation attention=sdpa precision=fp16 {_POINT}",
    "quantised": f"measure precision=fp8 precision.quantise.scale=block precision.quantise.block=32 {_POINT}",
    "int8": f"measure precision=int8 precision.quantise.values=e4m3fn:saturate precision.quantise.values_scale=channel {_POINT}",
    "microscaled": f"measure precision=kernel_bf16 precision.inputs=nvfp4 precision.probabilities=e2m1finite/16/e4m3 {_POINT}",
    "formats": "measure -m precision=kernel_bf16 precision.probabilities=e4m3fn:toward_zero,nf4,e2m1finite:saturate,posit8 "
    + _POINT,
    "stochastic": f"measure precision=kernel_fp32 precision.accumulator=bf16:stochastic tiling.bc=1 problem=constant {_POINT}",
    "polynomial": f"measure softmax.exp=exp2_poly3 {_POINT}",
    "softmax knobs": "measure -m softmax.scale_on=queries softmax.rescale_threshold=0,4 "
    f"softmax.sum_over=probabilities,exponentials precision=bf16 {_POINT}",
    "ties": f"measure problem=tied softmax.tie_shift=2 {_POINT}",
    "backwards": f"measure -m backward=exact,naive,tiled,vanilla,sdpa,rounded precision=fp32 problem=normal {_BACKWARD}",
    "backward precisions": f"measure -m precision=bf16,kernel_bf16,fp16,fp32,fp64,eager_bf16 {_TILES} {_BACKWARD}",
    "recompute": f"measure -m precision=kernel_bf16 recompute.delta=output,probabilities {_BACKWARD}",
    "backward orders": f"measure -m {_TILES} tiling.order=random,reverse backward.query_order=forward,reverse "
    f"problem.causal=true {_BACKWARD}",
    "portable kernel": f"measure -m attention=triton attention.kernel=portable precision=fp16,fp32 {_TILES} {_POINT}",
    "instrumented kernel": f"measure -m attention=instrumented precision=bf16,kernel_fp16 {_TILES} {_POINT}",
    "backward kernels": f"measure -m backward=triton,instrumented precision=kernel_fp16 {_TILES} {_BACKWARD}",
    "training": f"train backward=tiled precision=bf16 tiling.br=16 tiling.bc=16 rung.watch=true {_LANGUAGE}",
    "training, another start": f"train rung.ulp=1 rung.init=1 rung.order=1 {_LANGUAGE}",
    "training on scenes": f"train backward=tiled precision=bf16 tiling.br=8 tiling.bc=8 {_SCENES}",
    "another operation": "measure operation=rmsnorm seeds=1",
}

# Columns that two runs may differ in, and those that, with labels, are the key of a row.
_OF_THE_RUN = {"key", "environment", "seconds", "pairing", "kernel"}
_PLACE = {
    "study",
    "scenario",
    "seed",
    "cluster",
    "subject",
    "output",
    "reference",
    "step",
    "tensor",
}
_READ = "import numdev, pickle, sys; pickle.dump(numdev.load(sys.argv[1]).to_dict('list'), open(sys.argv[2], 'wb'))"

Table = dict[str, list[Any]]


@dataclass(frozen=True)
class Run:
    """The exit code of a command, the end of its messages, and its rows."""

    code: int
    messages: str
    table: Table


def run(tree: Path, command: str, folder: Path) -> Run:
    """Run a command with the code of a tree; its results lie in `folder`."""
    interpreted = {"TRITON_INTERPRET": "1"} if any(word in command for word in ("=portable", "=instrumented", "=triton")) else {}
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"} | interpreted
    arguments = [*shlex.split(command.replace("OUT", str(folder / "report"))), f"results={folder / 'results'}"]
    numdev = [sys.executable, "-c", "from numdev.cli.main import main; main()"]
    done = subprocess.run([*numdev, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    rows = folder / "rows.pickle"
    read = [sys.executable, "-c", _READ, str(folder / "results"), str(rows)]
    subprocess.run(read, cwd=tree, env=environment, capture_output=True, check=False)
    return Run(done.returncode, done.stderr[-600:], pickle.loads(rows.read_bytes()) if rows.exists() else {})


def differences(old: Run, new: Run) -> list[str]:
    """Sentences about what differs, the first few."""
    if old.code != new.code or bool(old.table) != bool(new.table):
        return [f"exit code {old.code}, now {new.code}: {new.messages}"]
    shared = [name for name in old.table if name in new.table and name not in _OF_THE_RUN]
    places = [name for name in shared if name in _PLACE or name.startswith("label.")]
    settings = ("problem.", "variant.", "baseline.")  # how an object is described may change
    figures = [name for name in shared if name not in places and not name.startswith(settings)]
    before, after = (_by_place(run.table, places, figures) for run in (old, new))
    if before.keys() != after.keys():
        return [f"rows only before: {list(before.keys() - after.keys())[:2]}, only now: {list(after.keys() - before.keys())[:2]}"]
    return [f"{place}: {before[place]}, now {after[place]}" for place in before if before[place] != after[place]][:3]


def _by_place(table: Table, places: list[str], figures: list[str]) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """The figures of the rows at each place, in an order that does not depend on that of the rows."""
    rows: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for index in range(len(next(iter(table.values()), []))):
        place = tuple(_text(table[name][index]) for name in places)
        rows.setdefault(place, []).append(tuple(_text(table[name][index]) for name in figures))
    return {place: sorted(of) for place, of in rows.items()}


def _text(value: object) -> str:
    """A number with all its bits."""
    return value.hex() if isinstance(value, float) else str(value)


def main() -> None:
    """Compare the working tree with a revision."""
    revision, *words = sys.argv[1:] or ["HEAD"]
    with tempfile.TemporaryDirectory() as temporary:
        before = Path(temporary) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(before), revision], cwd=ROOT, check=True)
        try:
            sys.exit(
                _compare(before, [name for name in COMMANDS if not words or any(word in name for word in words)], Path(temporary))
            )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT, check=True)


def _compare(before: Path, names: list[str], folder: Path) -> int:
    """The exit status; every command is run with both trees side by side."""
    different = 0
    with ThreadPoolExecutor(2) as pool:
        for number, name in enumerate(names):
            trees = {"old": before, "new": ROOT}
            runs = {which: pool.submit(run, tree, COMMANDS[name], folder / f"{number}{which}") for which, tree in trees.items()}
            old, new = runs["old"].result(), runs["new"].result()
            lines = differences(old, new)
            different += bool(lines)
            print(f"{name}: {'DIFFERS' if lines else 'equal'}, {len(next(iter(new.table.values()), []))} rows", flush=True)
            for line in lines:
                print(f"  {line}")
            columns = sorted(old.table.keys() ^ new.table.keys())
            if columns:
                print(f"  columns of one revision alone: {', '.join(columns)}")
    print(f"{len(names) - different} of {len(names)} commands give equal numbers")
    return int(different > 0)


if __name__ == "__main__":
    main()
