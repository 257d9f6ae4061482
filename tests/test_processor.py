"""Which sort NumPy takes, from what a system says of its processor; and that no sorted value depends on it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy
import pytest

from numdev import processor

BLOCK = (
    "processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 25\nmodel name\t: {vendor} {flags}\nflags\t\t: fpu sse2 avx2 {flags}\n"
)
ZEN_4 = BLOCK.format(vendor="AuthenticAMD", flags="avx512f avx512bw avx512_vbmi2")
XEON = BLOCK.format(vendor="GenuineIntel", flags="avx512f avx512bw avx512_vbmi2")
ZEN_3 = BLOCK.format(vendor="AuthenticAMD", flags="")
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        (ZEN_4, True),
        (f"{ZEN_4}\n{ZEN_4}", True),
        (ZEN_4[:-40], False),  # cut within the flags
        (XEON, False),
        (ZEN_3, False),
        (f"{ZEN_3}\n{ZEN_4}", False),
        (ARM, False),
        ("", False),
        (BLOCK.format(vendor="AuthenticAMD", flags="avx512fp16 not_avx512f"), False),
    ],
)
def test_amd_with_avx_512_sorts_slowly(text: str, slow: bool) -> None:
    assert processor.sorts_wide_slowly(text) is slow


@pytest.fixture
def zen_4(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(processor, "_cpuinfo", lambda: ZEN_4)
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    return monkeypatch


def test_the_variable_is_set_before_numpy_loads(zen_4: pytest.MonkeyPatch) -> None:
    zen_4.delitem(sys.modules, "numpy", raising=False)
    processor.choose_sort()
    assert os.environ[processor.VARIABLE] == processor.wide(numpy.__version__)


@pytest.mark.parametrize("stated", ["", "AVX2"])
def test_what_the_user_set_stays(zen_4: pytest.MonkeyPatch, stated: str) -> None:
    zen_4.delitem(sys.modules, "numpy", raising=False)
    zen_4.setenv(processor.VARIABLE, stated)
    processor.choose_sort()
    assert os.environ[processor.VARIABLE] == stated


def test_nothing_is_set_where_it_has_no_effect_or_no_use(zen_4: pytest.MonkeyPatch) -> None:
    zen_4.setitem(sys.modules, "numpy", sys)  # loaded: it has read the variable
    processor.choose_sort()
    zen_4.delitem(sys.modules, "numpy")
    zen_4.setattr(processor, "_cpuinfo", lambda: XEON)
    processor.choose_sort()
    assert processor.VARIABLE not in os.environ


SORTED = """
import hashlib, numpy
values = numpy.random.default_rng(0).standard_normal(20_000)
found = [numpy.sort(each).tobytes() for each in (values, values.astype(numpy.float32), numpy.append(values, [numpy.nan, 0.0]))]
print(hashlib.sha256(b"".join(found)).hexdigest(), *numpy.show_config(mode="dicts")["SIMD Extensions"]["found"])
"""


@pytest.mark.parametrize(
    ("numpy", "names"), [("2.4.6", "X86_V4 AVX512_ICL"), ("2.10.0rc1", "X86_V4 AVX512_ICL"), ("2.3.9", "AVX512_SKX AVX512_ICL")]
)
def test_names_of_a_version(numpy: str, names: str) -> None:
    assert processor.wide(numpy) == names


def test_numpy_knows_the_names_and_sorts_alike_without_these_paths() -> None:
    """One child has all paths, one those that are left. A processor without them gets the warning, and this test no errors."""
    said = []
    for stated in ("", processor.wide(numpy.__version__)):
        environment = {**os.environ, processor.VARIABLE: stated}
        done = subprocess.run([sys.executable, "-c", SORTED], env=environment, capture_output=True, text=True, check=True)
        said.append(done.stdout.split())
    assert said[0][0] == said[1][0]
    assert not {"X86_V4", "AVX512_SKX", "AVX512_ICL"} & set(said[1])


def test_importing_numdev_chooses_before_anything_loads_numpy() -> None:
    code = "import sys, numdev; assert 'numdev.processor' in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
