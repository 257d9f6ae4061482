"""What a package index shows: links that lead somewhere, or none."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

from hatch_build import absolute, origin, urls

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
HOST = "https://example.org/people/numdev"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_with_a_repository_every_link_is_absolute() -> None:
    shown = absolute(README, HOST)
    assert len(LINK.findall(shown)) == len(LINK.findall(README))
    assert [link for link in LINK.findall(shown) if not link.startswith("https://")] == []
    assert f"]({HOST}/raw/HEAD/reports/reference/cpu/figures/fig4.svg)" in shown
    assert f"[findings]({HOST}/blob/HEAD/docs/findings.md)" in shown
    for link in re.findall(rf"{HOST}/(?:raw|blob)/HEAD/([^)]+)", shown):
        assert (ROOT / link).is_file()


def test_without_a_repository_no_link_leads_nowhere() -> None:
    shown = absolute(README, "")
    assert [link for link in LINK.findall(shown) if not link.startswith("https://")] == []
    assert "![" not in shown
    assert "*Figure 4 of the paper" not in shown, "a caption without its figure"
    assert "findings (`docs/findings.md`)" in shown


def test_the_urls_of_the_project() -> None:
    assert list(urls("")) == ["Paper"]
    assert urls(HOST)["Repository"] == HOST
    assert all(address.startswith("https://") for address in urls(HOST).values())


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.org/people/numdev.git", HOST),
        ("https://token@example.org/people/numdev", HOST),
        ("git@example.org:people/numdev.git", HOST),
        ("ssh://git@example.org/people/numdev.git", HOST),
        ("/srv/git/numdev", ""),
        ("", ""),
    ],
)
def test_the_repository_is_gits_origin(remote: str, address: str, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    if remote:
        subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    assert origin(tmp_path) == address
