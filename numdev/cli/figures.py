"""The figure that `plot=` of a command that measures asks for: refused before anything is measured, drawn after all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from numdev.cli import expand, point, runners
from numdev.cli.claims import plot_of
from numdev.cli.commands import Drawing, plot_parts
from numdev.errors import BadInput
from numdev.measurement.runner import Kind


def refuse(cfg: DictConfig, names: Collection[str], measured: Kind, *, needs_x: bool = False) -> None:
    """Find out before anything is measured that the figure of a command cannot be drawn.

    Args:
        cfg: the composed configuration.
        names: of what the points differ in, or state.
        measured: their kind of measurement.
        needs_x: whether nothing says what the points differ in, so that `x` has to.

    Raises:
        BadInput: naming the part of the figure.
    """
    plot = plot_parts(cfg)
    if plot and needs_x and "x" not in plot:
        raise BadInput("plot.x", None, "there is no sweep that says what the figure is over; name a setting, as in x: problem.n")
    metrics = runners.figures(measured)
    plot_of(plot, names, list(dict.fromkeys([*metrics, *(name.rpartition(".")[2] for name in metrics)])), whole=False)


def refuse_of_sweep(cfg: DictConfig, command: str, overrides: Sequence[Override]) -> None:
    """Refuse a figure that a sweep over points, or over studies, cannot have; `cfg` has Hydra's own part too."""
    expander = expand.expander(cfg.hydra, cfg, command)
    study = next((one for one in overrides if one.key_or_group == "study"), None)
    if study is None:
        names = [one.key_or_group for one in overrides if one.is_sweep_override()]
        refuse(cfg, [*names, *point.params_of(cfg.hydra), *expander.manner, *expander.task], runners.kind(command, cfg))
        return
    for name in study.sweep_string_iterator() if study.is_sweep_override() else [str(study.value())]:
        own = expander.of(name)
        axes = own.axes(own.library.study(name))
        try:
            refuse(cfg, list(axes), runners.kind(command, cfg, own.composer.of), needs_x=not axes)
        except BadInput as error:
            raise BadInput(error.field, error.value, f"{error.hint} (study {name})") from None


def draw(drawings: Iterable[Drawing]) -> None:
    """Draw each figure once, and print where it is.

    Raises:
        BadInput: where what was measured has nothing to draw.
        StoreError: if a file cannot be written.
    """
    from numdev.cli.progress import output
    from numdev.report.document.figures import figure_of  # late: a report's libraries
    from numdev.report.reading.frames import load
    from numdev.results.store import Store

    console = output()
    for drawing in {(one.study, str(one.results)): one for one in drawings}.values():
        try:
            results = load(Store(drawing.results), [drawing.study])
            picture = figure_of(results, drawing.plot)
        except BadInput as error:
            hint = f"{error.hint}; the points are kept, so numdev report plot= draws another figure of them"
            raise BadInput(error.field, error.value, hint) from None
        path = drawing.out / drawing.study
        picture.write(path)
        for note in results.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        console.print(f"figure: {path}.png and .svg", markup=False, highlight=False, soft_wrap=True)
