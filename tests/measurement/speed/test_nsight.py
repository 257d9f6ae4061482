"""What Nsight Compute prints, read: figures by range, units, and what it says when it fails."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from numdev.measurement.speed.traffic import profile, read
from tests.fake_ncu import HEADER, UNITS, row

READ, WRITTEN, CACHE = METRICS = ["dram__bytes_read.sum", "dram__bytes_write.sum", "l1tex__m_xbar2l1tex_read_bytes.sum"]
PROF = "==PROF== Connected to process 1576 (/usr/bin/python3.12)"


def log(*rows: str, units: str = UNITS) -> str:
    return "\n".join([PROF, HEADER, units, *rows, "==PROF== Disconnected from process 1576"]) + "\n"


def test_figures_by_range_are_sums_over_its_kernels() -> None:
    text = log(
        row(3, "100,663,296", "33,554,432.50", "1"), row(0, "10", "20", "30", "a"), row(0, "1", "2", "3", "b, with a comma")
    )
    assert read(text, METRICS) == {
        3: {READ: 100663296.0, WRITTEN: 33554432.5, CACHE: 1.0},
        0: {READ: 11.0, WRITTEN: 22.0, CACHE: 33.0},
    }


@pytest.mark.parametrize("text", ["", PROF, "==ERROR== nothing\n", HEADER])
def test_a_log_without_a_table_has_no_figures(text: str) -> None:
    assert read(text, METRICS) == {}


@pytest.mark.parametrize(
    ("unit", "factor"), [("byte", 1), ("Kbyte", 1e3), ("Mbyte", 1e6), ("Gbyte", 1e9), ("sector", 32), ("Ksector", 32e3)]
)
def test_units(unit: str, factor: float) -> None:
    assert read(log(row(0, "1.5", "0", "0"), units=UNITS.replace("byte", unit)), METRICS)[0][READ] == 1.5 * factor


@pytest.mark.parametrize("unit", ["", "byte/s", "%", "kbyte", "KiB"])
def test_another_unit_is_refused(unit: str) -> None:
    with pytest.raises(ValueError, match=r"dram__bytes_read\.sum is in"):
        read(log(row(0, "1", "1", "1"), units=UNITS.replace("byte", unit)), METRICS)


def test_what_is_no_number_and_what_is_missing_are_named() -> None:
    with pytest.raises(ValueError, match=r"dram__bytes_write\.sum is 'n/a'"):
        read(log(row(0, "1", "n/a", "1")), METRICS)
    with pytest.raises(ValueError, match="is 'nan', which is no number"):
        read(log(row(0, "1", "nan", "1")), METRICS)
    with pytest.raises(ValueError, match=r"no column lts__t_sectors\.sum"):
        read(log(row(0, "1", "1", "1")), [*METRICS, "lts__t_sectors.sum"])


def fake(folder: Path, body: str) -> str:
    """A program that has the path of the log in `log`."""
    program = folder / "ncu"
    head = f"#!{sys.executable}\nimport sys, time\nfrom pathlib import Path\n"
    program.write_text(head + "log = Path(sys.argv[sys.argv.index('--log-file') + 1])\n" + body)
    program.chmod(0o755)
    return str(program)


def test_a_run_tells_figures_and_remarks(tmp_path: Path) -> None:
    said = "numdev:4 RuntimeError: one two"
    ncu = fake(tmp_path, f"log.write_text({log(row(2, '1', '2', '3'))!r}); print({said!r}, file=sys.stderr); print(sys.argv)\n")
    result = profile(ncu, METRICS, ["program", "file"], {}, 30.0)
    assert result.bytes == {2: {READ: 1.0, WRITTEN: 2.0, CACHE: 3.0}}
    assert result.remarks == {4: "RuntimeError: one two"}
    assert result.trouble == ""


@pytest.mark.parametrize(
    ("body", "trouble"),
    [
        ("log.write_text('==ERROR== ERR_NVGPUCTRPERM - no permission\\n')", "ncu: ERR_NVGPUCTRPERM - no permission"),
        ("print('==ERROR== unrecognised option'); sys.exit(1)", "ncu: unrecognised option; ended with 1"),
        ("print('numdev:0 left out'); sys.exit('No module named numdev')", "ncu: ended with 1; No module named numdev"),
        (
            f"log.write_text({log(row(0, '1', '1', '1'), units=UNITS.replace('byte', 'ns'))!r})",
            "ncu: dram__bytes_read.sum is in 'ns'",
        ),
    ],
)
def test_what_went_wrong_is_said_in_its_own_words(tmp_path: Path, body: str, trouble: str) -> None:
    result = profile(fake(tmp_path, body + "\n"), METRICS, [], {}, 30.0)
    assert result.trouble.startswith(trouble)
    assert result.bytes == {}


@pytest.mark.parametrize(
    ("end", "seconds", "trouble"),
    [("time.sleep(60)", 2.0, "stopped after 2 s"), ("time.sleep(1)\nsys.exit(3)", 30.0, "ended with 3")],
)
def test_nothing_is_left_behind(tmp_path: Path, end: str, seconds: float, trouble: str) -> None:
    """A child of ncu, which is what would hold the GPU, ends with it: where time is up, and where ncu dies."""
    pulse = tmp_path / "pulse"
    child = f"import time\nwhile True: open({str(pulse)!r}, 'a').write('.'); time.sleep(0.02)"
    ncu = fake(tmp_path, f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n{end}\n")
    assert profile(ncu, METRICS, [], {}, seconds).trouble == f"ncu: {trouble}"
    _assert_still(pulse)


def test_ctrl_c_ends_all_of_it(tmp_path: Path) -> None:
    import _thread

    pulse = tmp_path / "pulse"
    ncu = fake(tmp_path, f"while True: open({str(pulse)!r}, 'a').write('.'); time.sleep(0.02)\n")
    timer = threading.Timer(1.5, _thread.interrupt_main)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without a handler
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            profile(ncu, METRICS, [], {}, 60.0)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    _assert_still(pulse)


def _assert_still(pulse: Path) -> None:
    assert pulse.is_file()
    size = pulse.stat().st_size
    time.sleep(0.2)
    assert pulse.stat().st_size == size > 0
