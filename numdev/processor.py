"""Which vector instructions NumPy may sort with on this processor."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

VARIABLE = "NPY_DISABLE_CPU_FEATURES"
_FIRST = 8192  # characters of /proc/cpuinfo that hold its first processor


def sorts_wide_slowly(cpuinfo: str) -> bool:
    """Whether sorting by AVX-512 is slower than by AVX2 on the first processor of a text like `/proc/cpuinfo`.

    NumPy's sort by AVX-512 writes through compressing stores, which AMD's Zen 4 carries out in microcode: there it takes 5.5
    times as long as the sort by AVX2, on an Intel Xeon half as long.
    """
    lines = (line.partition(":") for line in cpuinfo.split("\n\n", maxsplit=1)[0].splitlines())
    said = {name.strip(): value.split() for name, _, value in lines}
    return said.get("vendor_id") == ["AuthenticAMD"] and "avx512f" in said.get("flags", [])


def wide(numpy: str) -> str:
    """NumPy's names for its sorts by AVX-512, of those that such a processor of AMD has; it warns of every other name."""
    major, minor = (int(part) for part in numpy.split(".")[:2])
    return "X86_V4 AVX512_ICL" if (major, minor) >= (2, 4) else "AVX512_SKX AVX512_ICL"


def choose_sort() -> None:
    """Let NumPy sort by AVX2 where that is faster, unless it is loaded already or the user has set `VARIABLE`, also to nothing.

    NumPy reads the variable once, when it loads. Of what a measurement takes from NumPy (sorts, differences, sums of a fixed
    order) no bit depends on it.
    """
    if "numpy" not in sys.modules and VARIABLE not in os.environ and sorts_wide_slowly_here():
        os.environ[VARIABLE] = wide_here()


def sorts_wide_slowly_here() -> bool:
    """`sorts_wide_slowly` of this machine, where it tells of its processor as Linux does."""
    return sorts_wide_slowly(_cpuinfo())


def wide_here() -> str:
    """`wide` of the NumPy that is installed."""
    return wide(version("numpy"))


def _cpuinfo() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return file.read(_FIRST)
    except OSError:
        return ""
