"""Bad input of every command ends with 2 and one sentence, which names the field and what to give instead."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from numdev.measurement.runner import Runner
from tests.cli.commands import Command, python, refusal

BAD = [
    # the command, the field that the sentence names, what else it says
    ("measure -m precision=bf16,bf17", "precision", "did you mean bf16"),  # before the first of a sweep
    ("measure tiling.bc=0", "tiling.bc", "at least 1"),
    ("measure problem=captured problem.source.path=none.safetensors", "problem.source.path", "no such file"),
    ("measure problem.source.std=3", "problem.source.std", "problem=normal_logits"),
    ("measure problem.n=100000000000", "problem", "GiB"),
    ("measure problem.n=abc", "problem.n", "whole number"),
    ("measure seeds=two", "seeds: 'two'", "give a whole number: replicates"),
    ("measure problem.n=null", "problem.n", "whole number"),
    ("measure problem.causal=maybe", "problem.causal", "true or false"),
    ("measure problem.n=16,32", "problem.n", "-m"),
    ("measure 'problem.n=${problem.tokens}'", "problem.n", "problem.tokens"),
    ("measure problem.n=[1", "problem.n=[1", "setting=value"),
    ("measure problem.n=64 problem.n=128", "problem.n", "is given too; give one value"),
    ("measure -m problem.n=64,128 precision=bf16 problem.n=256", "problem.n", "is given too; give one value"),
    ("measure precision=bf16 +precision=fp16", "precision", "is given too; give one value"),
    ("measure tiling.bcc=16", "tiling.bcc", "did you mean tiling.bc"),
    ("measure +tokens=16", "tokens", "no such setting"),
    ("measure ++problem.tokens=16", "problem.tokens", "no such setting"),
    ("measure ~problem.window", "problem.window", "null"),
    ("measure attention=custom", "attention.function", "package.module:function"),
    ("measure device=tpu", "device", "cuda"),
    ("measure seeds=0", "seeds", "at least 1"),
    ("measure study=fig99", "study", "fig"),
    ("measure study=fig3 study.titel=x", "study.titel: 'x'", "did you mean study.title"),
    ("measure study.title=x", "study.title", "give study=NAME too"),
    ("measure study=speed_cpu", "study", "numdev speed study=speed_cpu"),
    ("measure study=[fig3,fig4]", "study", "-m study="),
    ("measure shard=1", "shard", "study="),
    ("measure workers=2", "workers", "give study= too"),
    ("measure study=fig3 workers=0", "workers", "at least 1"),
    ("measure objective=out.rsme", "objective", "did you mean out.rmse"),
    ("measure study=fig3 objective=out.rmse", "objective", "'out.rmse' cannot be used; "),
    ("measure -m softmax.p_scale=interval(1,4)", "softmax.p_scale", "it lists no values"),
    ("measure out=o", "out", "no such setting"),
    ("measure operation=training", "operation", "use numdev train"),
    ("measure baseline=reference", "baseline", "a run of numdev train"),
    ("measure variant=foo", "variant", "as in attention=tiled"),
    ("measure attention=tiled attention.backend=cudnn", "attention.backend", "only attention=sdpa has it"),
    ("measure attention=sdpa precision=golden", "precision", "name a format alone"),
    ("measure --bogus", "numdev measure: '--bogus'", "no such flag"),
    ("measure --config-dir nowhere", "Additional config directory", "nowhere' not found"),
    ("measure -cn nothing", "configs: 'nothing'", "no such file"),
    ("mesure", "numdev", "did you mean measure"),
    ("speed out=shown", "out", "a study ends with a report"),
    ("speed attention=flex tiling.splits=2", "tiling.splits", "attention=flex does not read it"),
    ("speed baseline.normalise=end", "baseline.normalise", "only baseline=eager and baseline=uniform have it"),
    ("speed baseline=uniform", "baseline", "speed is compared between variants"),
    ("speed timing.seconds=0", "timing.seconds", "0.0 cannot be used"),
    ("train study=fig3", "operation", "numdev train compares runs"),
    ("train rung.numeric=fp32", "rung.numeric", "did you mean rung.numerics"),
    ("train rung.numerics=fp32", "precision: 'bf16'", "give precision=eager_fp32"),
    ("train rung.numerics=fp33", "rung.numerics: 'fp33'", "did you mean fp32"),
    ("train precision=eager_fp64", "precision: 'fp64'", "no run computes in it"),
    ("train baseline.numerics=bf16", "baseline.numerics: 'bf16'", "autocast_bf16"),
    ("train backward=tiled tiling.sram=4096", "tiling.sram: 4096", "give tiling.br"),
    ("train backward=sdpa precision=bf16 tiling.bc=32", "tiling.bc: 32", "backward=sdpa does not read it"),
    ("train task=scenes_smal", "task: 'scenes_smal'", "did you mean scenes_small"),
    ("train task=imagefolder", "task.data.path", "a folder with a subfolder of images for each caption"),
    ("train fresh=true", "fresh", "runs are shared"),
    ("train baseline=eager", "baseline", "not a baseline for problems"),
    ("train task=language baseline=none", "baseline", "leave it out"),
    ("train task=language task.data.path=nowhere", "task.data.path", "'nowhere' cannot be used; "),
    ("map output=dq", "output", ""),
    ("map problem=captured seed=24", "seed", ""),
    ("map subject=golden", "subject", ""),
    ("map baseline=uniform", "baseline", ""),
    ("map study=fig3", "study", ""),
    ("map softmax=fa1 attention=exact", "softmax", ""),
    ("paper study=fig3", "study", ""),
    ("paper studies=[fig99]", "study", ""),
    ("paper studies=[]", "studies", ""),
    ("paper shard=1", "shard", ""),
    ("report study=a studies=b", "studies", "is given too; give one value"),
    ("report results=nowhere", "results", "there is no such folder"),
    ("report format=xls", "format", "pdf"),
    ("report from=here", "from", "no such setting"),
]


@pytest.mark.parametrize(("command", "field", "hint"), BAD, ids=[row[0] for row in BAD])
def test_bad_input_is_one_sentence_that_names_the_field(numdev: Command, command: str, field: str, hint: str) -> None:
    sentence = refusal(numdev(*shlex.split(command)))
    assert sentence.startswith(field)
    assert hint in sentence


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(numdev: Command) -> None:
    assert refusal(numdev("measure", "device=cuda")).startswith("device: 'cuda'")


def test_a_traceback_is_shown_where_it_is_wanted(tmp_path: Path) -> None:
    ran = python("-m", "numdev.cli.main", "measure", "tiling.bc=0", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert "Traceback" in ran.stderr
    assert "BadInput" in ran.stderr


@pytest.mark.usefixtures("toy_configs")
@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("measure results=file", "results"),
        ("measure -m problem.n=8,16 results=file", "results"),
        ("measure --config-dir mine study=toy results=file", "results"),
        ("paper --config-dir mine studies=[toy] out=old", "out"),
        ("train study=fig8 out=old", "out"),
        ("map out=file", "out"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    numdev: Command, monkeypatch: pytest.MonkeyPatch, command: str, field: str
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(Runner, "measure", measured)
    Path("file").touch()
    Path("old").mkdir()
    Path("old/report.json").touch()
    assert refusal(numdev(*command.split())).startswith(f"{field}: ")
