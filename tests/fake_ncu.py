"""A program in the place of Nsight Compute's `ncu`: it runs nothing, and says what a test wants it to say of each point."""

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


def row(number: int, read: str, written: str, cache: str, kernel: str = "range", stored: str = "0") -> str:
    """One line of the table: of a range, or of a kernel in it."""
    ranges = f'"1576  ""<default domain>:numdev:{number}:none:none:none:none:none"" "'
    return f'"0","1576",{ranges},"","{kernel}","(132, 1, 1)","32","{read}","{written}","{stored}","{cache}"'


_SCRIPT = """#!{python}
import pickle, sys, time
from pathlib import Path

arguments = sys.argv[1:]
log = Path(arguments[arguments.index("--log-file") + 1])
points = pickle.loads(Path(arguments[-1]).read_bytes())
with open({calls!r}, "a") as file:
    file.write(f"{{len(points)}}\\n")
HEADER, UNITS = {header!r}, {units!r}
lines = ["==PROF== Connected to process 1576 (/usr/bin/python3.12)", HEADER, UNITS]
lines += [{row!r}.replace("<n>", str(n)).replace("<r>", f"{{1000 * (n + 1):,}}") for n in range(len(points))]
code = 0
{behaviour}
log.write_text("\\n".join(lines) + "\\n")
sys.exit(code)
"""


class FakeNcu:
    """Each point reads 1000 (its number + 1) bytes, writes 500, and moves 3000 + 1000 beyond the cache; `behaves` changes it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls, self._program = folder / "calls", folder / "bin" / "ncu"
        self._program.parent.mkdir()
        monkeypatch.setenv("PATH", f"{self._program.parent}{os.pathsep}{os.environ['PATH']}")
        self.behaves("")

    def behaves(self, behaviour: str) -> None:
        """Lines of Python that change `lines` of the log or the exit `code`."""
        text = _SCRIPT.format(
            python=sys.executable,
            calls=str(self._calls),
            header=HEADER,
            units=UNITS,
            row=row(0, "<r>", "500", "3,000", stored="1,000").replace("numdev:0", "numdev:<n>"),
            behaviour=behaviour,
        )
        self._program.write_text(text)
        self._program.chmod(0o755)

    @property
    def chunks(self) -> list[int]:
        """How many points each process got, in the order in which they ran."""
        return [int(line) for line in self._calls.read_text().split()] if self._calls.exists() else []
