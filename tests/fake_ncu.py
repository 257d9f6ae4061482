"""A program in the place of Nsight Compute's `ncu`: it runs nothing, and says what a test wants it to say of the call."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HEADER = (
    '"ID","Process ID","thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",'
    '"Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg","Kernel Name","Grid Size",'
    '"device__attribute_warp_size","dram__bytes_read.sum","dram__bytes_write.sum",'
    '"l1tex__m_l1tex2xbar_write_bytes.sum","l1tex__m_xbar2l1tex_read_bytes.sum"'
)
UNITS = '"","","","","","","","byte","byte","byte","byte"'
"""As `--print-units base` has them."""


def row(read: str, written: str, cache: str, kernel: str = "range", stored: str = "0") -> str:
    """One line of the table: of a range, or of a kernel in it."""
    ranges = '"1576  ""<default domain>:numdev:call:none:none:none:none:none"" "'
    return f'"0","1576",{ranges},"","{kernel}","(132, 1, 1)","32","{read}","{written}","{stored}","{cache}"'


def log(*rows: str, units: str = UNITS) -> str:
    prof = "==PROF== Connected to process 1576 (/usr/bin/python3.12)"
    return "\n".join([prof, HEADER, units, *rows, "==PROF== Disconnected from process 1576"]) + "\n"


class FakeNcu:
    """The call reads 1000 bytes, writes 500, and moves 3000 + 1000 beyond the cache; `behaves` changes it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls, self._program = folder / "calls", folder / "bin" / "ncu"
        self._program.parent.mkdir()
        monkeypatch.setenv("PATH", f"{self._program.parent}{os.pathsep}{os.environ['PATH']}")
        self.behaves("")

    def behaves(self, behaviour: str) -> None:
        """Lines of Python that change the `text` of the log or the exit `code`."""
        self._program.write_text(
            f"#!{sys.executable}\nimport subprocess, sys, time\nfrom pathlib import Path\n"
            f"open({str(self._calls)!r}, 'a').write('.')\n"
            f"code, text = 0, {log(row('1,000', '500', '3,000', stored='1,000'))!r}\n"
            f"{behaviour}\n"
            "Path(sys.argv[sys.argv.index('--log-file') + 1]).write_text(text)\nsys.exit(code)\n"
        )
        self._program.chmod(0o755)

    @property
    def calls(self) -> int:
        """How often it ran."""
        return len(self._calls.read_text()) if self._calls.exists() else 0
