"""Imports point one way: command line and explorer, report and training, measurement, results, attention, arithmetic."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "numdev"
# Section 4: what each folder may import, apart from itself and the modules of the root that all may import.
ARROWS = {
    "arithmetic": (),
    "results": (),
    "measurement": ("results", "arithmetic"),
    "attention": ("arithmetic",),
    "training": ("operations", "measurement", "results", "attention", "arithmetic"),
    "operations": ("measurement", "results", "attention", "arithmetic"),
    "report": ("results", "measurement", "arithmetic"),
    "certification": ("measurement", "results", "attention", "arithmetic"),
    "explorer": ("report", "measurement", "results", "attention", "arithmetic", "api"),
    "cli": ("report", "certification", "training", "measurement", "results", "attention", "arithmetic", "api"),
}
# Where an operation declares what the others must know of it.
DECLARES = ("attention.operation",)
FOR_ALL = ("errors", "lazy", "settings", "sources")
# Parts of several implementations of attention; the rest are implementations.
SHARED: tuple[str, ...] = ("base", "cost", "differentiable", "recurrence", "steps", "tile_schedule", "vendor.dispatch")
IMPLEMENTATIONS: tuple[str, ...] = ("exact", "naive", "tiled", "instrumented", "triton")
IMPLEMENTATIONS += ("vendor.custom", "vendor.flash_attn", "vendor.flex", "vendor.sage", "vendor.sdpa", "vendor.vanilla")

# Exact gradients that are rounded once follow a tiled forward pass in FP64; long tiled runs on a GPU go by the instrumented
# kernel, which has the settings of tiled attention; and PyTorch has the tiles of FlashAttention-2.
MAY_USE = {"exact": "tiled", "tiled": "instrumented", "instrumented": "tiled", "vendor.sdpa": "vendor.flash_attn"}


@dataclass(frozen=True)
class Import:
    """One module that a module imports; `late` where a function does it, or a type checker alone."""

    importer: str
    imported: str
    late: bool

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported}"

    def is_of(self, *packages: str) -> bool:
        return any(self.imported == package or self.imported.startswith(f"{package}.") for package in packages)


def names(path: Path) -> str:
    return ".".join(["numdev", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {names(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(name: str) -> tuple[Import, ...]:
    return tuple(_imports(name, ast.parse(MODULES[name])))


def _imports(name: str, tree: ast.Module) -> Iterator[Import]:
    late = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_for_the_type_checker(function)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, id(node) in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            assert node.module
            yield Import(name, node.module, id(node) in late)
            yield from (Import(name, f"{node.module}.{alias.name}", id(node) in late) for alias in node.names)


def _is_for_the_type_checker(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def of(*parts: str) -> list[str]:
    """The modules that are one of these parts of numdev, or lie in one."""
    expected = [f"numdev.{part}" for part in parts]
    return [name for name in MODULES if any(name == part or name.startswith(f"{part}.") for part in expected)]


def forbidden(importers: list[str], *imported: str, late_too: bool = True) -> list[str]:
    assert importers
    return [str(each) for name in importers for each in imports(name) if each.is_of(*imported) and (late_too or not each.late)]


def inside(*parts: str) -> list[str]:
    return [f"numdev.{part}" for part in parts]


def beyond(importers: list[str], *allowed: str, within: str = "numdev.attention") -> list[str]:
    """Imports from `within` of anything that is not allowed."""
    imported = [each for name in importers for each in imports(name) if each.imported.startswith(f"{within}.")]
    assert imported
    return [str(each) for each in imported if not each.is_of(*inside(*allowed))]


@pytest.mark.parametrize("folder", ARROWS)
def test_arrows_point_down(folder: str) -> None:
    importers = [name for name in of(folder) if name not in of(*DECLARES)]
    assert not beyond(importers, folder, *ARROWS[folder], *FOR_ALL, within="numdev")


OF_REPORT = ("reading", "statistics", "claims", "figures", "studies", "document", "comparison")  # each may import those before it


@pytest.mark.parametrize("folder", OF_REPORT)
def test_inside_the_report_too_arrows_point_one_way(folder: str) -> None:
    after = OF_REPORT[OF_REPORT.index(folder) + 1 :]
    assert not forbidden(of(f"report.{folder}"), *(f"numdev.report.{each}" for each in after))


def test_every_folder_has_arrows_and_what_all_may_import_knows_none() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(ARROWS)
    assert not forbidden(of(*FOR_ALL), *inside(*ARROWS))


def test_implementations_of_attention_never_import_each_other() -> None:
    implementations = [f"numdev.attention.{name}" for name in IMPLEMENTATIONS]
    for name in IMPLEMENTATIONS:
        known = [f"numdev.attention.{each}" for each in (name, MAY_USE.get(name, name))]
        assert not forbidden(known[:1], *(other for other in implementations if other not in known))
    assert not forbidden([f"numdev.attention.{name}" for name in SHARED], *implementations)


HOST = ("kernels", "hopper", "launch", "order")
KERNELS = [name for name in of("attention.kernels") if name.rpartition(".")[2] not in HOST]
# By library, or module of numdev: who may import it, and who may do so when it is itself imported.
ONLY: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hydra": (("cli",), ("cli",)),
    "omegaconf": (("cli",), ("cli",)),
    "ipywidgets": (("explorer",), ("explorer.widgets",)),
    "pyarrow": (("report", "results.store"), ("report",)),
    **dict.fromkeys(("pandas", "matplotlib", "typst"), (("report",), ("report",))),
    "triton": ((*(kernels := tuple(name.removeprefix("numdev.") for name in KERNELS)), "operations"), kernels),
    "numdev.explorer.widgets": (("explorer",), ("explorer.widgets",)),
    "numdev.cli": (("cli",), ("cli",)),
    "numdev.training": (("training", "cli"), ("training", "cli")),
}


@pytest.mark.parametrize("what", ONLY)
def test_who_may_import(what: str) -> None:
    may, at_once = ONLY[what]
    assert not forbidden([name for name in MODULES if name not in of(*may)], what)
    assert not forbidden([name for name in MODULES if name not in of(*at_once)], what, late_too=False)


def test_kernels_and_the_report_are_imported_only_where_they_are_used() -> None:
    assert len(KERNELS) >= 5
    elsewhere = [name for name in MODULES if name not in of("attention.kernels")]
    assert not forbidden(elsewhere, *KERNELS, late_too=False)
    late = [name for name in of("report") if name not in ("numdev.report", *of("report.statistics"))]
    assert not forbidden([name for name in MODULES if name not in of("report")], *late, late_too=False)


def test_measurements_results_and_reports_name_no_operation() -> None:
    """An operation declares itself to measurements and records alone."""
    assert not forbidden(of("measurement", "results", "report"), *inside("attention", "training"))
    assert not forbidden(of("report"), *inside("measurement.runner", "measurement.studies"))
    assert not forbidden(of("measurement.metrics"), *inside("measurement.runner", "measurement.operation", "results"))
    assert not beyond(
        of(*DECLARES), "attention", "arithmetic", "errors", "settings", "measurement", "results.record", within="numdev"
    )


# What the kernels may know of attention: value objects, and nothing that computes attention.
VALUES = tuple(f"attention.{name}" for name in ("accepts", "mask", "precision", "softmax", "tiling"))


def test_kernels_and_value_objects_know_value_objects_alone() -> None:
    assert not beyond(of("attention.kernels"), "attention.kernels", *VALUES)
    assert not beyond(of(*VALUES), *VALUES)


@pytest.mark.parametrize("folder", ["hydra_plugins", "benchmarks", "experiments", "docs_hooks"])
def test_hydra_is_extended_by_public_means(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    paths = sorted((PACKAGE.parent / folder).rglob("*.py"))
    for path in paths:
        monkeypatch.setitem(MODULES, str(path), path.read_text())
    assert not forbidden([*MODULES, *map(str, paths)], "hydra._internal", "unittest.mock", "mock")


def test_the_rules_see_what_they_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import numdev.report.document.report\ndef late():\n    from numdev.cli import main\n    import torch\n"
    monkeypatch.setitem(MODULES, "numdev.fake", text)
    assert forbidden(["numdev.fake"], "numdev.report") == ["numdev.fake imports numdev.report.document.report"]
    assert len(forbidden(["numdev.fake"], "numdev.cli", "torch")) == 3
    assert len(beyond(["numdev.fake"], "report", within="numdev")) == 2
    assert not forbidden(["numdev.fake"], "numdev.cli", "torch", late_too=False)
