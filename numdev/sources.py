"""Digests of sources, by which results are filed: numdev's own, and those of a user's function or class.

A function is known by what it computes, not by its name. So its digest is taken of

- the file of its module, and of every module that the file imports, also inside of functions, from the same folder or package,
  and what these import in turn. A compiled extension among them counts with its bytes. Where the module lies in an installation
  (site-packages, the standard library), only its own package is followed;
- the name and the version of every other package that those files import, and of Python for a module that is built into it.
  torch, numpy, triton and numdev are left out: the environment of a record names them.

Imports are read from the syntax tree, so a module that `importlib.import_module` imports is not seen, nor is a file that the
function opens. Python keeps a module as it was imported, also after a change of its file: see `loaded`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import platform
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from numdev.errors import BadInput, NumdevError

PACKAGE = Path(__file__).resolve().parent
KEEPS_OR_SHOWS = (
    "cli/",
    "explorer/",
    "measurement/studies.py",
    "report/",
    "results/store.py",
    "results/study.py",
    "training/doctor.py",
    "training/recorders.py",
)
"""Modules that no measurement runs. Each states what is measured, keeps it or shows it. No other module imports these."""


def config_folder() -> Path:
    """The folder of the configs that ship with numdev: in an installed package, or beside it in a checkout."""
    for folder in (PACKAGE / "configs", PACKAGE.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise NumdevError(f"configs: there is no folder of that name in {PACKAGE} or beside it; install numdev again")


def package_version() -> str:
    """The installed version of numdev, or that of the source tree."""
    try:
        return importlib.metadata.version("numdev")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def computing(package: Path = PACKAGE) -> list[Path]:
    """The Python files of the package that a measurement can run, in the order of their names."""
    names = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    return [names[name] for name in sorted(names) if not name.startswith(KEEPS_OR_SHOWS)]


def digest_of(package: Path) -> str:
    """SHA-256 of the names and the bytes of `computing(package)`: a comment counts too, documentation beside them does not."""
    sources = hashlib.sha256()
    for path in computing(package):
        data = path.read_bytes()
        sources.update(f"{path.relative_to(package).as_posix()}\0{len(data)}\0".encode() + data)
    return sources.hexdigest()


@lru_cache(maxsize=1)
def digest() -> str:
    """That of numdev as it was when this process first asked for it, which is when it imports what measures."""
    return digest_of(PACKAGE)


_NAMED_BY_THE_ENVIRONMENT = {"torch", "numpy", "triton", "numdev"}
_SEEN: dict[str, tuple[Any, str]] = {}  # by module: the spec from which it was imported, and the digest of its file then


@dataclass(frozen=True)
class Loaded:
    """A function, the digest of the sources that define it, and those of their modules that are imported, with their specs."""

    function: Callable[..., Any]
    digest: str
    modules: tuple[tuple[str, Any], ...]

    @property
    def is_current(self) -> bool:
        """Whether none of the modules has been imported again, so that the function still runs the sources of the digest."""
        return all(_spec(name) is spec for name, spec in self.modules)


def loaded(name: str, field: str) -> Loaded:
    """The function `package.module:function`, imported, and what its sources are.

    The digest is that of the code which runs. So a function is refused until `importlib.reload` has read its file, where the
    file of a module has changed since numdev first looked at it, or where numdev looks for the first time at a module that was
    imported before, and a function of it is not the one of its file. An edit of a value outside of all functions, made after a
    session imported the module and before numdev first looked at it, is not seen.

    Raises:
        BadInput: naming `field`, where there is no such function, or its sources are not those that were imported.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith(".") or module.endswith(".py"):
        raise BadInput(field, name, "write it as package.module:function")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise BadInput(field, name, f"its module cannot be imported ({error})") from error
    except (Exception, SystemExit) as error:
        last = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__} in {last.filename}, line {last.lineno}: {getattr(error, 'msg', error)}"
        raise BadInput(field, name, f"its module cannot be imported ({reason})") from error
    if not callable(function):
        raise BadInput(field, name, f"module {module} has no function {attribute}")
    if module == "__main__" and _path(module) is None:
        raise BadInput(field, name, "results are filed by its source; write the function to a file, and name it module:function")
    files, parts = _sources(module, name, field)
    return Loaded(function, _sha256("\0".join([name, *parts]).encode()), tuple((own, _spec(own)) for own in files))


def foreign(*objects: object) -> dict[str, str]:
    """Under `sources`, the digest of the modules of those objects' classes that are not numdev's own; nothing where all are.

    A class that was written in a session, and is in no file, is known by its name and its fields alone.

    Raises:
        BadInput: where a file has changed since it was imported, see `loaded`.
    """
    modules = sorted({type(each).__module__ for each in objects if each is not None})
    own = [name for name in modules if name.partition(".")[0] not in ("numdev", "builtins")]
    parts = [part for name in own if name in sys.modules and _path(name) for part in _sources(name, name, "variant")[1]]
    return {"sources": _sha256("\0".join(parts).encode())} if parts else {}


def _sources(module: str, name: str, field: str) -> tuple[dict[str, Path], list[str]]:
    """The files of a module by the modules that they hold, and what stands for each file and each other package."""
    files, outside = _walk(module)
    for own, path in files.items():
        if own in sys.modules and not _is_imported(own, path):
            hint = f"{path} has changed since {own} was imported; call importlib.reload on it, or start Python again"
            raise BadInput(field, name, hint)
    parts = [f"{own} {_sha256(files[own].read_bytes())}" for own in sorted(files)]
    return files, parts + [f"{top} {_version(top)}" for top in sorted(outside)]


def _walk(module: str) -> tuple[dict[str, Path], set[str]]:
    """The files by module that `module` consists of, and the packages that it takes from elsewhere."""
    top, start = module.partition(".")[0], _path(module)
    if start is None:
        return {}, {top}
    folder = start.parents[module.count(".") + (start.stem == "__init__")]  # holds the module, or its outermost package
    places = (Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib"))
    installed = any(folder.is_relative_to(place) for place in places)
    files, outside, todo = {module: start}, {top} if installed else set[str](), [(module, start)]
    while todo:
        name, path = todo.pop()
        for imported in _imports(path.read_bytes(), _package(name, path)) if path.suffix == ".py" else ():
            first, parts = imported.partition(".")[0], imported.split(".")
            if first in _NAMED_BY_THE_ENVIRONMENT:
                continue
            if first != top and (installed or not ((folder / first).is_dir() or _below(folder, first))):
                outside.add(first)
                continue
            for own in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):  # Python runs its parents too
                if own not in files and (file := _below(folder, own)) is not None:
                    files[own] = file
                    todo.append((own, file))
    return files, outside - _NAMED_BY_THE_ENVIRONMENT - sys.stdlib_module_names


def _path(module: str) -> Path | None:
    file = getattr(sys.modules[module], "__file__", None)
    return Path(file).resolve() if file and Path(file).is_file() else None


def _spec(module: str) -> Any:
    """A new object at each import and reload of the module; None for the script that runs, which is read once."""
    return getattr(sys.modules.get(module), "__spec__", None)


def _below(folder: Path, module: str) -> Path | None:
    """The file of a module, if it lies in the folder."""
    base = folder.joinpath(*module.split("."))
    endings = ("/__init__.py", ".py", *EXTENSION_SUFFIXES)
    return next((file for ending in endings if (file := Path(f"{base}{ending}")).is_file()), None)


def _package(module: str, path: Path) -> str:
    """The package of a module, from which its relative imports start."""
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


@lru_cache(maxsize=256)
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    """Modules that a source of a package may import: its package, and of `from a import b` both `a` and `a.b`, if that is one."""
    names = {package: None} if package else {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = f"{base}.{node.module or ''}".strip(".")
            names |= dict.fromkeys((base, *(f"{base}.{alias.name}" for alias in node.names)))
    return tuple(names)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version(top: str) -> str:
    """Of an installed package; of Python for one of its own modules."""
    if top in sys.stdlib_module_names:
        return platform.python_version()
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        owners = sorted(set(importlib.metadata.packages_distributions().get(top, ())))
        return " ".join(f"{owner} {importlib.metadata.version(owner)}" for owner in owners) or "unknown"


def _is_imported(module: str, path: Path) -> bool:
    """Whether a module of `sys.modules` is what its file says now, as far as that can be told; see `loaded`.

    Of a compiled extension, and of a module that an import hook has rewritten, it cannot be told at the first look, nor of
    functions that come from another file or from a decorator.
    """
    spec, digest = _spec(module), _sha256(path.read_bytes())
    if module in _SEEN and _SEEN[module][0] is spec:
        return _SEEN[module][1] == digest
    if path.suffix == ".py" and type(getattr(spec, "loader", None)) in (SourceFileLoader, type(None)):
        known = set(_codes(compile(path.read_bytes(), str(path), "exec", dont_inherit=True)))
        held = list(vars(sys.modules[module]).values())
        methods = [method for cls in held if isinstance(cls, type) for method in vars(cls).values()]
        own = [each for each in held + methods if isinstance(each, FunctionType) and each.__module__ == module]
        if not all(each.__code__ in known for each in own if Path(each.__code__.co_filename).resolve() == path):
            return False
    _SEEN[module] = spec, digest
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
