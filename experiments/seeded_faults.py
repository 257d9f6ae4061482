"""Show that the tests notice: seed one fault at a time into a copy of the package and expect the tests to fail.

Run: `python experiments/seeded_faults.py`, or with words to seed only the faults whose names hold one of them. The copy is
a temporary folder; the tree itself is never written. First the copy must pass as it is. Exits with 1 if a fault survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("numdev", "tests", "configs", "pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `numdev/{file}`; tests of a module, such as `attention/mask`, must fail."""

    name: str
    file: str
    old: str
    new: str
    modules: tuple[str, ...]


RECURRENCE, STEPS, COMMON = "attention/recurrence.py", "attention/steps.py", "attention/commonsteps.py"
BACKWARD = ("attention/backward/tiled",)

FAULTS = (
    Fault(
        "dS without delta",
        "attention/backward/steps.py",
        'self._do("weigh difference", self._do("shift dp", dp, delta), p)',
        'self._do("weigh difference", dp, p)',
        BACKWARD,
    ),
    Fault(
        "P enters the gradient of V unrounded",
        "attention/backward/recurrence.py",
        "p = self.steps.probabilities(found.p)",
        "p = found.p",
        BACKWARD,
    ),
    Fault(
        "LSE not in the units of the scores",
        "attention/backward/steps.py",
        "if not exponential.is_binary:",
        "if True:",
        BACKWARD,
    ),
    Fault(
        "query tiles before heads",
        "attention/backward/recurrence.py",
        """        for head in range(q.shape[2]):
            for start, stop in found.met:
""",
        """        for start, stop in found.met:
            for head in range(q.shape[2]):
""",
        BACKWARD,
    ),
    Fault(
        "a query tile at the edge of the mask is left out",
        "attention/backward/recurrence.py",
        "if start < last and stop > first]",
        "if start < last and start >= first]",
        BACKWARD,
    ),
    Fault(
        "delta of rows that see nothing",
        "attention/backward/tiled.py",
        "        delta.masked_fill_(hidden, 0.0)\n",
        "",
        BACKWARD,
    ),
    Fault(
        "what is not seen is left in dS",
        "attention/backward/recurrence.py",
        "            ds = _seen(ds, found.visible)\n",
        "",
        BACKWARD,
    ),
    Fault(
        "dK is not scaled",
        "attention/backward/tiled.py",
        "steps.scale_dk(dk, run.factor)",
        "dk",
        BACKWARD,
    ),
    Fault(
        "dK and dV in the order of the KV tiles",
        "attention/backward/tiled.py",
        "self.tiling.order if self.query_order is None else self.query_order",
        "self.tiling.order",
        BACKWARD,
    ),
    Fault(
        "delta of the rounded output whatever is asked for",
        "attention/backward/base.py",
        "if reads is OutputForDelta.ROUNDED:",
        "if True:",
        BACKWARD,
    ),
    Fault(
        "ties of a listed format go down",
        "arithmetic/listing.py",
        "up = (x > turn) | ((x == turn) & tie)",
        "up = x > turn",
        ("arithmetic/listing",),
    ),
    Fault(
        "golden gradients without delta",
        "attention/backward/exact.py",
        "sub_(delta).mul_(p)",
        "mul_(p)",
        ("attention/backward/exact",),
    ),
    Fault(
        "stored P weighs dP unrounded",
        "attention/backward/naive.py",
        "p = steps.share(p, steps.row_sum(p))",
        "p = p / steps.row_sum(p)",
        ("attention/backward/naive",),
    ),
    Fault(
        "O is not rescaled",
        RECURRENCE,
        "            self._rescale_(o, alpha)\n",
        "            pass\n",
        ("attention/tiled",),
    ),
    Fault(
        "l is not rescaled",
        STEPS,
        'return self._do("weigh sum", row_sum.clone(), factor)',
        "return row_sum.clone()",
        ("attention/tiled",),
    ),
    Fault(
        "alpha l is not rounded",
        STEPS,
        'return self._do("weigh sum", row_sum.clone(), factor)',
        "return row_sum * factor",
        ("attention/tiled",),
    ),
    Fault(
        "alpha by the polynomial of P",
        RECURRENCE,
        "alpha = steps.rescale(m_old, m, soft.exp.exact)",
        "alpha = steps.rescale(m_old, m, soft.exp)",
        ("attention/tiled",),
    ),
    Fault(
        "P against the old maximum",
        RECURRENCE,
        "largest if local else m, soft.exp)",
        "largest if local else m_old, soft.exp)",
        ("attention/tiled",),
    ),
    Fault(
        "row sum for row maximum",
        "attention/softmax.py",
        "largest = scores.amax(-1, keepdim=True)",
        "largest = scores.sum(-1, keepdim=True)",
        ("attention/softmax", "attention/tiled"),
    ),
    Fault(
        "P is not cast",
        STEPS,
        "return cast.apply_(p.mul_(scale), self.noise)",
        "return p.mul_(scale)",
        ("attention/tiled",),
    ),
    Fault(
        "p_scale is not divided out",
        RECURRENCE,
        "return product if scale == 1.0 else",
        "return product if scale > 0.0 else",
        ("attention/tiled",),
    ),
    Fault(
        "scale applied twice",
        COMMON,
        'self._do("scale scores", s, factor)',
        'self._do("scale scores", s, factor**2)',
        ("attention/tiled",),
    ),
    Fault(
        "LSE without log l",
        STEPS,
        "return self._do(name, m, log).masked_fill_(empty, NEVER)",
        "return m.masked_fill_(empty, NEVER)",
        ("attention/tiled",),
    ),
    Fault(
        "LSE with m in base 2",
        STEPS,
        'self._do("unscale maximum", m, log_scale)',
        "m",
        ("attention/tiled",),
    ),
    Fault(
        "a row without keys is divided by 0",
        STEPS,
        "return row_sum.masked_fill(row_sum == 0, 1.0)",
        "return row_sum",
        ("attention/tiled",),
    ),
    Fault(
        "splits combined without weights",
        STEPS,
        "self.rescale_output(out.clone(), weight)",
        "self.rescale_output(out.clone(), torch.ones_like(weight))",
        ("attention/tiled",),
    ),
    Fault(
        "grouped heads repeated instead of interleaved",
        "attention/base.py",
        "return q.unflatten(1, (kv_heads, -1))",
        "return q.unflatten(1, (-1, kv_heads)).transpose(1, 2)",
        ("attention/exact",),
    ),
    Fault("causal mask off by one", "attention/mask.py", "key <= position", "key < position", ("attention/mask",)),
    Fault(
        "causal mask aligned top left",
        "attention/mask.py",
        "[:, None] + (keys - queries)",
        "[:, None]",
        ("attention/mask",),
    ),
    Fault(
        "first query of a tile off by one",
        "attention/mask.py",
        "first = start - shift if self.causal else 0",
        "first = start - shift + 1 if self.causal else 0",
        ("attention/tiled",),
    ),
    Fault(
        "ragged tile at the front",
        "attention/tiling.py",
        "(t * self.bc, min((t + 1) * self.bc, keys))",
        "(max(0, keys - (count - t) * self.bc), keys - (count - t - 1) * self.bc)",
        ("attention/tiled",),
    ),
    Fault(
        "lazy threshold in the wrong unit",
        "attention/softmax.py",
        "self.rescale_threshold * math.log(2)",
        "self.rescale_threshold / math.log(2)",
        ("attention/softmax",),
    ),
    Fault(
        "exp2 that depends on an element's place",
        "attention/softmax.py",
        "return exp2(x) if self.is_binary",
        "return x.exp2_() if self.is_binary",
        ("attention/softmax",),
    ),
    Fault(
        "truncation for nearest in round_scaled",
        "arithmetic/bits.py",
        "return t.round()",
        "return t.trunc()",
        ("arithmetic/rounding",),
    ),
    Fault(
        "truncation for nearest instead of round_magic",
        "arithmetic/rounding.py",
        "round_magic(part, self.to, out=part)",
        "part.copy_(round_scaled(part, self.to, Rounding.TOWARD_ZERO))",
        ("arithmetic/rounding",),
    ),
    Fault(
        "round_magic's constant without its half",
        "arithmetic/bits.py",
        "mul_(1.5 * 2.0",
        "mul_(1.0 * 2.0",
        ("arithmetic/rounding",),
    ),
    Fault(
        "FP64 rounded through FP32",
        "arithmetic/rounding.py",
        "(carrier is torch.float32 and self.to.dtype in (torch.bfloat16, torch.float16))",
        "self.to.dtype in (torch.bfloat16, torch.float16)",
        ("arithmetic/rounding",),
    ),
    Fault(
        "subnormals flushed",
        "arithmetic/rounding.py",
        "if self.subnormals is Subnormals.FLUSHED:\n            x.mul_",
        "if self.to.dtype is not None:\n            x.mul_",
        ("arithmetic/rounding",),
    ),
    Fault(
        "-0 lost",
        "arithmetic/bits.py",
        "return torch.copysign(rounded, x, out=out)",
        "return out.copy_(rounded)",
        ("arithmetic/rounding",),
    ),
    Fault(
        "stochastic rounding that ignores the place",
        "arithmetic/noise.py",
        "_mix(place * _signed(_GOLDEN) + _signed(key))",
        "_mix(0 * place + _signed(key))",
        ("arithmetic/rounding",),
    ),
    Fault(
        "E4M3FN up to 480",
        "arithmetic/formats.py",
        "lost = 2 if self.specials is Specials.NAN_ONLY else 1",
        "lost = 1",
        ("arithmetic/rounding",),
    ),
    Fault(
        "running sum rounded at the end only",
        "arithmetic/dot.py",
        "return RoundedOnce(Operation.ADD, self.accumulate, carrier, self.accumulate.to, part.dtype)(part, total, noise)",
        "return part.add_(total)",
        ("attention/precision",),
    ),
    Fault(
        "inputs narrowed before they are rounded",
        "attention/policy.py",
        "cast(t.double(), noise).to(carrier)",
        "cast(t.to(carrier), noise)",
        ("attention/precision",),
    ),
    Fault(
        "FP32 carrier for 12 bits",
        "attention/policy.py",
        "c.to.precision <= 11",
        "c.to.precision <= 12",
        ("attention/precision",),
    ),
    Fault(
        "mean of k not added again",
        "arithmetic/quantise.py",
        "is_q=False) + mean_k",
        "is_q=False)",
        ("arithmetic/quantise",),
    ),
    Fault(
        "mean of q meets the quantised k",
        "arithmetic/quantise.py",
        "torch.cat([rounded_k, k], -1)",
        "torch.cat([rounded_k, rounded_k], -1)",
        ("arithmetic/quantise",),
    ),
    Fault(
        "a block's scale one power of two too large",
        "arithmetic/microscale.py",
        "exponent.long() - 1 - self.element",
        "exponent.long() - self.element",
        ("arithmetic/microscale",),
    ),
    Fault(
        "l adds up P times its scale",
        STEPS,
        'return total if scale == 1.0 else self._do("unscale sum", total, scale)',
        "return total",
        ("attention/tiled",),
    ),
    Fault(
        "golden without its maximum in LSE",
        "attention/exact.py",
        "(m + row_sum.log())",
        "row_sum.log()",
        ("attention/exact",),
    ),
    Fault(
        "naive divides at the wrong end",
        "attention/naive.py",
        "if self.normalise is Normalise.EACH:",
        "if self.normalise is Normalise.END:",
        ("attention/naive",),
    ),
    Fault(
        "ties counted on past a new maximum",
        "attention/counters.py",
        "ties.masked_fill_((largest > before).squeeze(-1), 0).add_(equal)",
        "ties.add_(equal)",
        ("attention/counters",),
    ),
    Fault(
        "speed compares other heads than golden's",
        "attention/workload.py",
        "output[:1, : problem.shape.heads // problem.shape.kv_heads]",
        "output[:1, -(problem.shape.heads // problem.shape.kv_heads) :] * 1.01",
        ("measurement/speed/measurement",),
    ),
    Fault(
        "speed's NaN is no status",
        "measurement/speed/measurement.py",
        "nonfinite(compared))",
        "nonfinite([]))",
        ("measurement/speed/measurement",),
    ),
    Fault(
        "a kernel is predicted without its control",
        "report/studies/validate.py",
        "Question(self.distance, Region(high=MOST)), nearer, Question",
        "Question(self.distance, Region(high=MOST)), Question",
        ("report/claims/claims",),
    ),
    Fault(
        "the Hopper kernel's order is forward",
        "attention/triton.py",
        "bc=hopper_bc(shape.head_dim), order=Order.REVERSE",
        "bc=hopper_bc(shape.head_dim), order=Order.FORWARD",
        ("attention/emulation",),
    ),
    Fault(
        "a scenario that does not stand for the source decides a claim",
        "report/claims/verdicts.py",
        "self.findings[scenario].verdict for scenario in self.chief} - {Verdict.NOT_MEASURED}\n        if",
        "finding.verdict for finding in self.findings.values()} - {Verdict.NOT_MEASURED}\n        if",
        ("report/claims/claims",),
    ),
    Fault(
        "verdicts of a table are not adjusted for their number",
        "report/claims/finding.py",
        "tested = iter(holm([p for p in raw if not math.isnan(p)]))",
        "tested = iter([p for p in raw if not math.isnan(p)])",
        ("report/claims/finding", "report/claims/claims"),
    ),
    Fault(
        "heads of a layer are independent",
        "report/statistics/estimates.py",
        "cluster_of[name] = None if clusters is None else clusters[place]",
        "cluster_of[name] = None",
        ("report/statistics/estimates",),
    ),
    Fault(
        "replicates take the first heads of the first layer",
        "attention/captured.py",
        "sorted(rounds, key=lambda item: item[0])[seed]",
        "rounds[seed]",
        ("attention/captured",),
    ),
    Fault(
        "masks that hide rows are not seen",
        "attention/mask.py",
        "return torch.stack([high > low for low, high in ranges])",
        "return torch.stack([high >= low for low, high in ranges])",
        (
            "attention/mask",
            "attention/vendor/vanilla",
        ),
    ),
    Fault(
        "flash is never seen to split the keys",
        "attention/vendor/sdpa.py",
        "blocks < 1.6 * torch",
        "blocks < 0.0 * torch",
        ("attention/emulation",),
    ),
    Fault(
        "one query is folded under a window too",
        "attention/triton.py",
        "== kv_heads or mask.window is not None:",
        "== kv_heads:",
        ("attention/triton",),
    ),
    Fault(
        "one query is folded under its causal limit",
        "attention/triton.py",
        "replace(mask, causal=False)",
        "mask",
        ("attention/triton",),
    ),
    Fault(
        "three warp groups where the limit is unaligned",
        "attention/kernels/hopper_host.py",
        "(keys < _SHORT or is_unaligned(queries, keys))",
        "keys < _SHORT",
        ("attention/kernels/hopper_host",),
    ),
    Fault("a sector of 16 bytes", "measurement/speed/nsight.py", '"sector": 32', '"sector": 16', ("measurement/speed/nsight",)),
    Fault(
        "what is written beyond the cache is not counted",
        "measurement/speed/traffic.py",
        "sum(found[metric] for metric in metrics)",
        "found[metrics[0]]",
        ("measurement/speed/traffic",),
    ),
    Fault(
        "lines of speed leave their panel",
        "report/studies/speed.py",
        "        axes.margins(y=0.08)\n",
        "        axes.margins(y=0.08)\n        axes.set_ylim(bottom=0)\n",
        ("report/document/speed",),
    ),
    Fault(
        "a report takes studies of the other kind",
        "report/reading/frames.py",
        'kind in (None, manifest["kind"])',
        "True",
        ("report/document/speed",),
    ),
    Fault(
        "long sequences are judged against the baseline",
        "report/studies/long.py",
        'over_length(rows, metric, "golden") for metric',
        "over_length(rows, metric) for metric",
        ("report/claims/claims",),
    ),
    Fault(
        "to odd away from the rest",
        "arithmetic/bits.py",
        "(x > 0) == (error > 0)",
        "(x > 0) != (error > 0)",
        ("arithmetic/rounded_once",),
    ),
    Fault(
        "wide operands taken for narrow", "arithmetic/elementary.py", "max(left, right) > p or", "", ("arithmetic/rounded_once",)
    ),
    Fault(
        "every event draws alike",
        "arithmetic/noise.py",
        "        self.event += 1\n",
        "",
        ("arithmetic/rounding", "attention/tiled"),
    ),
    Fault("minus infinity is rounded", COMMON, "p.masked_fill_(never, 0.0)", "p", ("attention/tiled",)),
    Fault(
        "padding reaches the sums",
        "attention/mask.py",
        "        if self.key_lengths is None:\n",
        "        if True:\n",
        ("attention/tiled",),
    ),
    Fault(
        "the local maximum without its factor", RECURRENCE, "if local else None\n", "if False else None\n", ("attention/tiled",)
    ),
    Fault(
        "blocks of the rows that there are",
        "arithmetic/products.py",
        "if missing := -height % ROWS:",
        "if missing := 0:",
        ("attention/precision",),
    ),
)


def run_tests(copy: Path, modules: tuple[str, ...]) -> tuple[int, str]:
    """The exit status of pytest on the copy, and the first test that failed."""
    files = [str(Path("tests", module).with_name(f"test_{Path(module).name}.py")) for module in modules]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "first failure"]  # no shrinking
    command = [sys.executable, "-m", "pytest", *options, *files]
    # No bytecode: a fault written within the second and of the same length would be hidden by the old one's.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else done.stdout[-300:]


def seed(copy: Path, fault: Fault) -> tuple[bool, str]:
    """Whether the tests notice the fault, and which test did."""
    path = copy / "numdev" / fault.file
    original = path.read_text()
    if original.count(fault.old) != 1:
        return False, f"the line to change occurs {original.count(fault.old)} times in {fault.file}"
    path.write_text(original.replace(fault.old, fault.new))
    try:
        status, first = run_tests(copy, fault.modules)
    finally:
        path.write_text(original)
    return status == 1, first  # 0: survived; above 1: the tests did not even run


def main(words: list[str]) -> int:
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).is_file():
                shutil.copy(ROOT / name, copy / name)
        modules = tuple(sorted({module for fault in chosen for module in fault.modules}))
        status, first = run_tests(copy, modules)
        if status:
            print(f"without any fault the tests fail: {first}")
            return 1
        print(f"without any fault: {', '.join(modules)} pass", flush=True)
        caught = 0
        for fault in chosen:
            noticed, first = seed(copy, fault)
            caught += noticed
            print(f"{'caught  ' if noticed else 'SURVIVED'}  {fault.name:46}  {first}", flush=True)
    print(f"{caught} of {len(chosen)} faults caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
