"""Whether everything that is stated explicitly is read by what would be measured: nothing is ignored without a word."""

from __future__ import annotations

from collections.abc import Mapping

from numdev.attention.honours import Declares
from numdev.cli.build import Settings
from numdev.cli.settings import Request, Said, flat
from numdev.cli.variants import MAKERS, arithmetic_of, kind_of
from numdev.errors import NotHonoured

_CHOICES = frozenset({"attention.kind", "baseline.kind", "seeds"})
_ONE_EMULATION = frozenset({"tiling.bc", "tiling.order", "tiling.splits"})

_OVERRULED = (  # a setting, those that together leave nothing of it, and the value of theirs that does (None: any)
    ("problem.n", ("problem.queries", "problem.keys"), None),
    ("precision.inputs", ("precision.quantise.to",), None),
    ("tiling.br", ("tiling.shape",), "square_bc"),
)


def of_problem(config: Settings) -> frozenset[str]:
    """Every setting of a problem; which of them a source has, it says itself."""
    return frozenset(name for name, _ in flat({"problem": config["problem"]}))


def of_baseline(baseline: Mapping[str, str | None]) -> frozenset[str]:
    """What a baseline reads. An emulation takes the walk over the keys from the settings where its kernel does not say it."""
    if baseline["kind"] == "emulation":
        return _ONE_EMULATION
    return frozenset({"baseline.precision"} if baseline["precision"] == "none" else {"baseline.precision", "baseline.normalise"})


def check(request: Request) -> None:
    """Before anything is built.

    Raises:
        NotHonoured: naming the settings that are stated and not read, the variant, and what would read them.
    """
    config, said = request.config, request.said
    kind = kind_of(config)
    always = _CHOICES | of_problem(config) | of_baseline(config["baseline"])
    honoured = always | MAKERS[kind].type.honours.settings
    if ignored := [name for name in said if name not in honoured]:
        raise _refusal(ignored[0], said, _why(ignored, request, kind))
    values = dict(flat(config))
    for name, others, value in _OVERRULED:
        if all(_is_stated(said, other) and value in (None, values[other]) for other in others) and _is_stated(said, name):
            stronger = " and ".join(str(said[other]) for other in others)
            raise _refusal(name, said, f"beside {stronger} nothing of it is left; leave it out")


def check_built(request: Request, variant: Declares) -> None:
    """What is read under another setting alone.

    Raises:
        NotHonoured: naming the setting, and the one under which it is read.
    """
    kind = kind_of(request.config)
    for name, reader in variant.idle.items():
        if name in request.said:
            reads = f"attention={kind} reads {_called(name, request.said)} with {reader} alone"
            raise _refusal(name, request.said, f"{reads}; leave it out, or give {reader} too")


def _is_stated(said: Said, name: str) -> bool:
    """Whether a setting is stated by its name, and not by the file of an option, above which values stand."""
    return name in said and said[name].name == name


def _why(ignored: list[str], request: Request, kind: str) -> str:
    first, *others = ignored
    it, honours = _called(first, request.said), MAKERS[kind].type.honours
    if first.startswith("precision.") and honours.family:
        return arithmetic_of(kind)
    if first.startswith("baseline."):
        settings = request.config["baseline"]
        baseline = settings["precision"] if settings["kind"] == "naive" else settings["kind"]
        return f"baseline={baseline} does not read {it}; leave it out"
    also = "".join(f", nor {name}" for name in others)
    able = [other for other, maker in MAKERS.items() if maker.type.honours.settings.issuperset(ignored)]
    mend = f", or take attention={' or '.join([', '.join(able[:-1]), able[-1]] if able[1:] else able)}" if able else ""
    return f"attention={kind} does not honour {it}{also}; leave {'them' if others else 'it'} out{mend}"


def _called(name: str, said: Said) -> str:
    """What a sentence on the statement calls the setting."""
    return "it" if said[name].name == name else f"{name}, which it states"


def _refusal(name: str, said: Said, why: str) -> NotHonoured:
    return NotHonoured(said[name].name, said[name].value, why)
