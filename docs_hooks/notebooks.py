"""The notebooks as pages: kept without outputs, executed when the site is built, and shown with their figures.

An executed notebook is kept in `.cache/notebooks` under a digest of its text and of numdev's code, so that a build executes only
what changed. No plugin serves here: mkdocs-jupyter reads outputs from the committed files, or executes all at every build.
"""

from __future__ import annotations

import hashlib
import html
import os
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
KEPT = ROOT / ".cache" / "notebooks"
LIMIT = 300  # seconds of a cell, after which it hangs
_WIDGET = "application/vnd.jupyter.widget-view+json"
_NOTE = "!!! note\n    The widgets of this cell need a running notebook: `jupyter lab notebooks/{}`.\n"


@dataclass
class Page:
    """A notebook as Markdown, and the images that it refers to, by name."""

    text: str
    images: dict[str, bytes] = field(default_factory=dict)


def paths() -> list[Path]:
    """Every notebook."""
    return sorted(FOLDER.glob("*.ipynb"))


def title(path: Path) -> str:
    """The heading of a notebook's first cell."""
    return str(nbformat.read(path, as_version=4).cells[0].source).splitlines()[0].removeprefix("# ")


def pages(*, stale: bool = False) -> dict[str, Page]:
    """Every notebook as a page, by its name; `stale` takes results of older code too, if the notebook is the same."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:  # a kernel is a process of its own
        done = pool.map(lambda path: _executed(path, Path(folder), stale), paths())
        return {path.stem: _page(path, notebook) for path, notebook in zip(paths(), done, strict=True)}


def _executed(path: Path, folder: Path, stale: bool) -> Any:
    text = path.read_bytes()
    size = "small" if os.environ.get("NUMDEV_NOTEBOOK_SMALL") == "1" else "full"
    name = f"{path.stem}-{size}-{_digest(text, sys.version.encode())}"
    kept = KEPT / f"{name}-{_digest(*(each.read_bytes() for each in sorted((ROOT / 'numdev').rglob('*.py'))))}.ipynb"
    older = sorted(KEPT.glob(f"{name}-*.ipynb"))
    if kept.is_file() or (stale and older):
        return nbformat.read(kept if kept.is_file() else older[-1], as_version=4)
    notebook = _run(path, folder)
    KEPT.mkdir(parents=True, exist_ok=True)
    for each in KEPT.glob(f"{path.stem}-{size}-*.ipynb"):
        each.unlink(missing_ok=True)
    written = kept.with_suffix(f".{os.getpid()}")
    nbformat.write(notebook, written)
    written.replace(kept)
    return notebook


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()[:16]


def _run(path: Path, folder: Path) -> Any:
    """Execute a notebook with this interpreter."""
    from ipykernel.kernelspec import write_kernel_spec
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    kernels = folder / path.stem
    write_kernel_spec(str(kernels / "python3"))
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(kernels)]))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, km=manager, timeout=LIMIT)
    inherited = os.environ.get("PYTHONPATH", "")
    client.execute(cwd=str(FOLDER), env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{inherited}".rstrip(os.pathsep)})
    notebook.metadata.pop("widgets", None)
    return notebook


def _page(path: Path, notebook: Any) -> Page:
    found = Page("")
    parts = []
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            code = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
            parts.append(f"```python\n{code.rstrip()}\n```")
            parts.extend(_outputs(path, cell.outputs, f"{path.stem}_{i}", found.images))
    found.text = "\n\n".join(parts) + "\n"
    return found


def _outputs(path: Path, outputs: list[Any], name: str, images: dict[str, bytes]) -> Iterator[str]:
    """The outputs of a cell: the richest form that a page can show of each."""
    for k, output in enumerate(outputs):
        data = output.get("data", {})
        if output.output_type == "stream":
            yield f"```text\n{str(output.text).rstrip()}\n```"
        if _WIDGET in data:
            yield _NOTE.format(path.name)
        if "image/png" in data:
            images[f"{name}_{k}.png"] = b64decode(data["image/png"])
            yield f'<img class="notebook" src="{name}_{k}.png" alt="{html.escape(data.get("text/plain", "figure"))}">'
        elif "text/html" in data:
            yield f'<div class="notebook">{data["text/html"]}</div>'
        elif "text/plain" in data and _WIDGET not in data:
            yield f"```text\n{data['text/plain'].rstrip()}\n```"
