"""Launch settings of the portable kernels: what is chosen, that it fits, what `benchmarks.tune` keeps; tables on a GPU."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import tune
from numdev.arithmetic.formats import BF16, E5M2, FP16, FP32, Format
from numdev.attention.kernels import launch, portable
from numdev.attention.kernels.launch import (
    FEW_ROWS,
    IDLE,
    INTERPRETED,
    SAFE,
    SAFE_WIDE,
    Device,
    Launch,
    Tables,
    backward_shared_bytes,
    choose,
    choose_backward,
    shared_bytes,
    split_count,
    streaming,
)
from numdev.attention.mask import Mask
from numdev.attention.tiling import Tiling
from numdev.attention.triton import Triton
from numdev.errors import BadInput, Unsupported

CAUSAL, GPU = Mask(causal=True), torch.device("cuda", 0)
H100, A100, CPU = Device("sm_90", 232448), Device("sm_80", 166912), Device("interpreter")
SMALL = Device("sm_89", 101376)  # 99 KB: GeForce RTX 30 and 40, L4, L40


def row(head_dim: int, br: int, mask: str = "none", fmt: str = "bf16", generation: str = "sm_90") -> dict[str, Any]:
    place = {"format": fmt, "head_dim": head_dim, "mask": mask, "generation": generation}
    return place | {"br": br, "bc": 32, "warps": 8, "stages": 3}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "launch.json"
    entries = [row(64, 16), row(128, 32), row(64, 48, "causal"), row(64, 80, fmt="fp16"), row(64, 96, generation="sm_80")]
    path.write_text(json.dumps({"entries": entries}))
    monkeypatch.setattr(launch, "TABLE", path)
    launch.table.cache_clear()
    yield path
    launch.table.cache_clear()


CHOSEN: list[tuple[tuple[Any, ...], dict[str, Any], Launch]] = [
    ((BF16, 64, 512, Mask(), H100), {}, Launch(16, 32, 8, 3)),
    ((BF16, 40, 512, Mask(window=3), H100), {}, Launch(16, 32, 8, 3)),  # the next head_dim; a window changes no loop's shape
    ((BF16, 64, 512, CAUSAL, H100), {}, Launch(48, 32, 8, 3)),
    ((BF16, 129, 512, Mask(), H100), {}, SAFE_WIDE[0]),
    ((BF16, 64, 512, Mask(), CPU), {}, INTERPRETED),
    ((BF16, 64, 16, Mask(), H100), {}, FEW_ROWS[0]),
    ((BF16, 64, 40, Mask(), H100), {}, replace(FEW_ROWS[0], br=64)),
    ((FP16, 256, 33, CAUSAL, H100), {}, Launch(64, 64, 8, 3)),
    ((FP32, 64, 17, Mask(), H100), {}, SAFE[0]),
    ((BF16, 64, 512, Mask(), H100), {"br": 128, "bc": 128}, Launch(128, 128, 8, 2)),
    ((BF16, 256, 64, Mask(), H100), {"bc": 64}, Launch(64, 64, 8, 2)),  # O of 64 rows in eight warps here too
    ((FP32, 256, 512, Mask(), SMALL), {"br": 32, "bc": 32}, Launch(32, 32, 4, 1)),  # sides stay, stages give way
]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("request_", "sides", "expected"), CHOSEN)
def test_the_row_of_the_table_or_what_is_safe(request_: tuple[Any, ...], sides: dict[str, Any], expected: Launch) -> None:
    assert choose(*request_, **sides) == expected


@given(
    st.sampled_from([64 * 1024, SMALL.shared, 163 * 1024, 227 * 1024]),
    st.sampled_from([BF16, FP16, FP32, E5M2]),
    st.integers(1, 256),
    st.sampled_from([1, 512]),
    st.booleans(),
)
def test_a_tile_is_chosen_that_fits_the_device(shared: int, fmt: Format, head_dim: int, queries: int, causal: bool) -> None:
    """The least, 64 KB, are those of a T4, which no backward tile of FP32 at d = 256 fits: 16 x 16 needs 66,560 bytes."""
    device, mask = Device("sm_00", shared), Mask(causal=causal)
    assert shared_bytes(choose(fmt, head_dim, queries, mask, device), fmt, head_dim) <= shared
    if fmt != E5M2 and (fmt != FP32 or shared > 64 * 1024 or head_dim <= 128):
        launches = choose_backward(fmt, head_dim, mask, device)
        assert backward_shared_bytes(launches.keys, fmt, head_dim, False) <= shared
        assert backward_shared_bytes(launches.rows, fmt, head_dim, True) <= shared


def test_the_shipped_table_is_whole() -> None:
    launch.table.cache_clear()
    entries = launch.table()["entries"]
    places = [tuple(entry[name] for name in ("format", "head_dim", "mask", "generation")) for entry in entries]
    assert len(set(places)) == len(places) >= 8
    for entry in entries:
        assert "tune" in entry["command"]
        assert entry["device"]
        assert set(entry["versions"]) == {"torch", "triton"}
        pinned = Launch(entry["br"], entry["bc"], entry["warps"], entry["stages"])
        assert H100.holds(shared_bytes(pinned, Format.parse(entry["format"]), entry["head_dim"])), "the device that found it"


@given(st.integers(1, 400), st.integers(1, 200_000), st.sampled_from([16, 64, 128]), st.integers(1, 200))
def test_occupies_the_gpu_and_leaves_no_range_empty(blocks: int, keys: int, bc: int, multiprocessors: int) -> None:
    splits, tiles = split_count(blocks, keys, bc, multiprocessors), math.ceil(keys / bc)
    assert 1 <= splits <= tiles
    assert all(part for part in Tiling(bc=bc, splits=splits).key_tiles(keys))
    if splits < tiles:
        assert blocks * splits >= (1 - IDLE) * multiprocessors
    assert splits == 1 or blocks * (splits - 1) < multiprocessors, "one fewer would not do"


@given(st.sampled_from(FEW_ROWS), st.sampled_from([16, 32, 64]), st.integers(1, 1000), st.integers(0, 1000))
def test_more_tiles_have_no_less_memory_and_all_fit(row: Launch, br: int, tiles: int, most: int) -> None:
    row = replace(row, br=br)
    made, more = (streaming(row, count, lambda each: each.stages * each.bc <= most) for count in (tiles, tiles + 1))
    assert replace(made, stages=row.stages, bc=row.bc) == row
    assert made.bc in (row.bc, 128 if br > 16 and tiles > 16 else row.bc)
    assert made.stages * made.bc <= max(most, row.bc), "one stage is there whether it fits or not"
    assert made.stages * made.bc <= more.stages * more.bc or more.bc > made.bc
    assert most < 2 * row.bc or made.stages >= 2, "one tile is loaded while another is met"


@pytest.mark.parametrize("text", ["", "{}", '{"entries": [{"format": "bf16"}]}', "[]"])
def test_a_file_that_is_no_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "launch.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"^out: .*no table of launch settings"):
        launch.read(path)


def test_a_gpu_of_amd_is_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells compute capability (9, 0) of a gfx90a."""
    properties = {"gcnArchName": "gfx90a:sramecc+:xnack-", "major": 9, "minor": 0}
    properties |= {"shared_memory_per_block_optin": 65536, "multi_processor_count": 104}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert launch.device_of.__wrapped__(torch.device("cuda")) == Device("gfx90a:sramecc+:xnack-", 65536, 104)


class Stub:
    """A table whose copy to the GPU is itself."""

    def to(self, device: torch.device) -> Stub:
        return self


def test_tables_on_the_gpu_live_as_long_as_anything_may_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used goes, after every launch; one that a capture has used stays, and none is made in a capture."""
    waited, capturing, tables = list[torch.device](), [False], Tables(2)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    make: Any = Stub
    first, second = (tables.of(key, GPU, make) for key in "ab")
    assert tables.of("a", GPU, make) is first
    assert not waited
    tables.of("c", GPU, make)
    assert waited == [GPU]
    assert tables.of("a", GPU, make) is first
    assert tables.of("b", GPU, make) is not second
    capturing[0] = True
    captured = tables.of("b", GPU, make)
    with pytest.raises(Unsupported, match="call it once with these shapes before the capture"):
        tables.of("d", GPU, make)
    capturing[0] = False
    for key in range(20):
        tables.of(key, GPU, make)
    assert tables.of("b", GPU, make) is captured


def test_tuning_replaces_rows_one_by_one_and_keeps_the_others(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's part replaced: the second row of two fails, and the first is in the file."""
    made: list[int] = []

    def fake(fmt: Format, head_dim: int, mask: Mask, n: int) -> dict[str, Any]:
        if made:
            raise KeyboardInterrupt
        made.append(head_dim)
        return row(head_dim, 123)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(tune, "tune", fake)
    file = table.with_name("own.json")
    shutil.copy(table, file)
    with pytest.raises(KeyboardInterrupt):
        tune.main(["--formats", "bf16", "--head-dims", "64", "128", "--masks", "none", "--out", str(file)])
    entries = json.loads(file.read_text())["entries"]
    assert len(entries) == 5
    tuned = next(entry for entry in entries if entry["br"] == 123)
    assert tuned["command"].startswith("python -m benchmarks.tune --formats bf16 --head-dims 64 128 --masks none")
    assert (tuned["device"], set(tuned["versions"])) == ("a GPU", {"torch", "triton"})
    assert [entry["br"] for entry in entries if entry["head_dim"] == 64 and entry["mask"] == "none"].count(123) == 1
    assert row(128, 32) in entries
    assert row(64, 16) not in entries


def test_without_a_gpu_it_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        tune.main([])
    assert capsys.readouterr().err == "benchmarks.tune: tuning needs a CUDA device, and torch finds none here\n"


@pytest.mark.parametrize("fmt", [FP16, *(pytest.param(fmt, marks=pytest.mark.exhaustive) for fmt in (BF16, FP32, E5M2))])
def test_a_candidate_is_held_against_its_emulation(device: str, fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    made = portable.plan

    def right(wrong: float) -> bool:
        def scaled(*arguments: Any) -> Any:
            plan = made(*arguments)
            return plan._replace(run=lambda *qkv: (plan.run(*qkv)[0] * wrong,))

        monkeypatch.setattr(portable, "plan", scaled)
        return tune.Candidate(Triton(fmt), INTERPRETED, 16, CAUSAL, torch.device(device)).is_right()

    assert right(1.0)
    assert not right(1.5)
    assert not right(float("nan"))
