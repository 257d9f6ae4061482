"""What a package index shows of the README: a page without a repository behind it, so that links are absolute or none.

hatchling calls it when numdev is built. `[tool.hatch.metadata.hooks.custom]` in pyproject.toml states the repository's address,
or leaves that to git: the remote `origin` of the checkout. The source distribution keeps what was found, so that a wheel that is
built from it has the same page.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAPER = "https://arxiv.org/abs/2405.02803"
_IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?://)([^)]+)\)\n*")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://)([^)]+)\)")
_FIGURE_NOTE = re.compile(r"^\*[^*]+\*$\n*", re.MULTILINE)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the metadata of pyproject.toml, or of a source distribution, which has both already."""
        if "readme" in metadata:
            return
        root = Path(self.root)
        repository = self.config.get("repository") or origin(root)
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute((root / "README.md").read_text(), repository)}
        metadata["urls"] = urls(repository)


def urls(repository: str) -> dict[str, str]:
    """The project's URLs; without a repository the paper alone."""
    found = {"Paper": PAPER}
    if repository:
        found |= {
            "Repository": repository,
            "Documentation": f"{repository}/blob/HEAD/docs/index.md",
            "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
    return found


def absolute(text: str, repository: str) -> str:
    """The README with links into the repository; without one, each link is its words and the file, and images and captions go."""
    if repository:
        text = _IMAGE.sub(rf"![\1]({repository}/raw/HEAD/\2)\n\n", text)
        return _LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)", text)
    if _IMAGE.search(text):
        text = _FIGURE_NOTE.sub("", _IMAGE.sub("", text))
    return _LINK.sub(r"\1 (`\2`)", text)


def origin(root: Path) -> str:
    """The web address of git's remote `origin`; empty without git, without a checkout or where it is no address of a host."""
    try:
        ran = subprocess.run(
            ["git", "-C", str(root), "config", "--get", "remote.origin.url"], check=False, capture_output=True, text=True
        )
    except OSError:
        return ""
    found = re.fullmatch(r"(?:https://(?:[^@/]+@)?|git@|ssh://git@)([\w.-]+\.\w+)[:/](.+?)(?:\.git)?/?", ran.stdout.strip())
    return f"https://{found[1]}/{found[2]}" if found else ""
