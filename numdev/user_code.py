"""The sources of a user's function or class: the file that defines it, and what that imports from its own folder or package.

A function is known by what it computes, not by its name. So its digest is taken of

- the file of its module, and of every module that the file imports, also inside of functions, from the same folder or package,
  and what these import in turn. A compiled extension among them counts with its bytes. Where the module lies in an installation
  (site-packages, the standard library), only its own package is followed;
- the name and the version of every other package that those files import, and of Python for a module that is built into it.
  torch, numpy, triton and numdev are left out: the environment of a record names them.

Imports are read from the syntax tree, so a module whose name is computed when the program runs is not seen, nor is a file that
the function opens. Python keeps a module as it was imported, also after a change of its file: see `loaded`.
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
from types import CodeType, FunctionType, ModuleType
from typing import Any

from numdev.errors import BadInput

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

    The digest is that of the code which runs. So a function is refused until `importlib.reload` has read its file, where

    - the file of a module has changed since numdev first looked at it;
    - numdev looks for the first time at a module that was imported before, and a function of it is not the one of its file;
    - Python took a module from bytecode of an older file, which it does where both were written within one second and are of
      one size.

    An edit of a value outside of all functions, made after a session imported the module and before numdev first looked at it,
    is not seen.

    Raises:
        BadInput: naming `field`, where there is no such function, or its sources are not those that were imported.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise BadInput(field, name, "write it as package.module:function")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise BadInput(field, name, f"its module cannot be imported ({error})") from error
    except Exception as error:
        last = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__} in {last.filename}, line {last.lineno}: {getattr(error, 'msg', error)}"
        raise BadInput(field, name, f"its module cannot be imported ({reason})") from error
    if not callable(function):
        raise BadInput(field, name, f"module {module} has no function {attribute}")
    if module == "__main__" and _path(module) is None:
        raise BadInput(field, name, "results are filed by its source; write the function to a file, and name it module:function")
    files, parts = _sources(module, name, field)
    modules = tuple((own, _spec(own)) for own in files if own in sys.modules)
    return Loaded(function, _digest("\0".join([name, *parts]).encode()), modules)


def foreign(*objects: object) -> dict[str, str]:
    """Under `sources`, the digest of the modules of those objects' classes that are not numdev's own; nothing where all are.

    A class that was written in a session, and is in no file, is known by its name and its fields alone.

    Raises:
        BadInput: where a file has changed since it was imported, see `loaded`.
    """
    modules = sorted({type(each).__module__ for each in objects if each is not None})
    own = [name for name in modules if name.partition(".")[0] not in ("numdev", "builtins")]
    parts = [part for name in own if name in sys.modules and _path(name) for part in _sources(name, name, "variant")[1]]
    return {"sources": _digest("\0".join(parts).encode())} if parts else {}


def _sources(module: str, name: str, field: str) -> tuple[dict[str, Path], list[str]]:
    """The files of a module by the modules that they hold, and what stands for each file and each other package."""
    files, outside = _walk(module)
    for own in files:
        if own in sys.modules and not _is_imported(own, files[own]):
            hint = f"{files[own]} has changed since {own} was imported; call importlib.reload on it, or start Python again"
            raise BadInput(field, name, hint)
    parts = [f"{own} {_digest(files[own].read_bytes())}" for own in sorted(files)]
    return files, parts + [f"{top} {_version(top)}" for top in sorted(outside)]


def _walk(module: str) -> tuple[dict[str, Path], set[str]]:
    """The files by module that `module` consists of, and the packages that it takes from elsewhere."""
    top, start = module.partition(".")[0], _path(module)
    if start is None:
        return {}, {top}
    folder = start.parents[module.count(".") + (start.stem == "__init__")]  # holds the module, or its outermost package
    places = (Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib"))
    installed = any(folder.is_relative_to(place) for place in places)
    files, outside = dict[str, Path](), {top} if installed else set[str]()
    todo = [module, *_with_parents(module)]
    while todo:
        name = todo.pop()
        first = name.partition(".")[0]
        path = start if name == module else None if installed and first != top else _below(folder, name)
        if path is None and (installed or not (_below(folder, first) or (folder / first).is_dir())):
            outside.add(first)
        elif path is not None and name not in files and (name == module or first not in _NAMED_BY_THE_ENVIRONMENT):
            files[name] = path
            if path.suffix == ".py" and first not in _NAMED_BY_THE_ENVIRONMENT:
                todo += _imports(path.read_bytes(), name, path.name)
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


def _with_parents(module: str) -> list[str]:
    """`a`, `a.b`, `a.b.c` of `a.b.c`: Python runs them all."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


@lru_cache(maxsize=256)
def _imports(source: bytes, module: str, file: str) -> tuple[str, ...]:
    """Modules that a source may import: of `from a import b` both `a` and `a.b`, which may be a module or not."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # what cannot be read cannot be imported
        return ()
    package = module.split(".") if file == "__init__.py" else module.split(".")[:-1]
    return tuple(dict.fromkeys(part for node in nodes for name in _named(node, package) for part in _with_parents(name)))


def _named(node: ast.AST, package: list[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        yield from filter(None, [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")])
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and isinstance(name := node.args[0].value, str) and name.strip("."):
            yield name if not name.startswith(".") else ".".join([*package, name.lstrip(".")])


def _digest(data: bytes) -> str:
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
    """Whether a module of `sys.modules` is what its file says now."""
    spec, digest = _spec(module), _digest(path.read_bytes())
    if module in _SEEN and _SEEN[module][0] is spec:
        return _SEEN[module][1] == digest
    if not _is_of(sys.modules[module], path):
        return False
    _SEEN[module] = spec, digest
    return True


def _is_of(module: ModuleType, path: Path) -> bool:
    """Whether the functions of a module, and the bytecode that Python keeps of it, are those of its source.

    Of a compiled extension, and of a module that an import hook has rewritten, that cannot be told, nor of functions that come
    from another file or from a decorator.
    """
    loader = getattr(module.__spec__, "loader", None)
    if path.suffix != ".py" or type(loader) not in (SourceFileLoader, type(None)):
        return True
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    if isinstance(loader, SourceFileLoader) and loader.get_code(loader.name) != code:  # of `python -m` the module is __main__
        return False
    known, held = set(_codes(code)), list(vars(module).values())
    methods = [method for cls in held if isinstance(cls, type) for method in vars(cls).values()]
    own = [each for each in held + methods if isinstance(each, FunctionType) and each.__module__ == module.__name__]
    return all(each.__code__ in known for each in own if Path(each.__code__.co_filename).resolve() == Path(code.co_filename))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
