"""Whether a kernel can run on a device and how: pinned launch settings of the portable kernels, and tables that launches read.

The same request runs the same code in every process. The `br` of a tile decides the order in which dK and dV are summed, its `bc`
that of O and dQ. The backward tiles of 16-bit formats are the largest that the compiler keeps in registers for compute capability
9.0 (`tests/attention/kernels/test_compiled.py` shows it). Triton is not imported here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cachetools import LRUCache
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.attention.mask import Mask
from numdev.attention.tiling import KernelLaunch
from numdev.errors import BadInput, Unsupported

TABLE = Path(__file__).resolve().parents[2] / "data" / "launch.json"


class Kernel(Enum):
    """Which of our kernels runs."""

    AUTO = "auto"  # the kernel for Hopper GPUs, if the GPU is one and the kernel can run the request; else the portable one
    PORTABLE = "portable"
    HOPPER = "hopper"


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, in NumPy on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def triton_version() -> str:
    """The version of the installed package triton, or `none`."""
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"


def require(device: torch.device) -> None:
    """Raise Unsupported, naming the hint, unless Triton kernels can run on `device`."""
    if triton_version() == "none":
        raise Unsupported("attention", "the package triton is not installed; pip install 'numdev[kernels]'")
    if device.type != "cuda" and not interpreting():
        hint = "use device=cuda, or TRITON_INTERPRET=1 to interpret them"
        raise Unsupported("attention", f"Triton kernels need a CUDA device; {hint}")


def check_scale(scale: float) -> float:
    """Return the scale of the scores if kernels can apply it after the row maximum: `max(scale S) = scale max(S)` if positive.

    Raises:
        BadInput: unless it is positive and finite.
    """
    if not 0 < scale < float("inf"):
        raise BadInput("problem.scale", scale, "give a positive finite factor, or null for 1/sqrt(head_dim)")
    return scale


def held_dtype(fmt: Format) -> torch.dtype:
    """The dtype in which the fast kernels take and return tensors in a format of torch; FP32 where they are interpreted."""
    dtype = torch.float32 if interpreting() else fmt.dtype
    assert dtype is not None, "each of the formats has a dtype"
    return dtype


@dataclass(frozen=True)
class Device:
    """The properties of a device by which a launch is chosen.

    Attributes:
        generation: the compute capability, as the key of the table: `sm_90`; `interpreter` if the interpreter runs the kernels.
        shared: bytes of shared memory that a program may have; None where nothing limits it.
        multiprocessors: of a GPU; the interpreter runs one program at a time.
    """

    generation: str
    shared: int | None = None
    multiprocessors: int = 1

    @property
    def capability(self) -> int:
        """The compute capability of a GPU of NVIDIA, 90 for 9.0; 0 of what is none."""
        return int(self.generation[3:]) if self.generation.startswith("sm_") else 0

    def holds(self, shared: int) -> bool:
        """Whether a program may have so many bytes of shared memory."""
        return self.shared is None or shared <= self.shared


@lru_cache(maxsize=8)
def device_of(device: torch.device) -> Device:
    """The properties of a device. A GPU of AMD, for torch a CUDA device of capability (9, 0), is named by its architecture."""
    if device.type != "cuda":
        return Device("interpreter")
    properties: Any = torch.cuda.get_device_properties(device)
    compute = f"sm_{properties.major}{properties.minor}"
    generation = compute if torch.version.hip is None else str(properties.gcnArchName)
    return Device(generation, int(properties.shared_memory_per_block_optin), properties.multi_processor_count)


@dataclass(frozen=True)
class Launch:
    """A tile, warps of a program, and stages of the software pipeline."""

    br: int
    bc: int
    warps: int
    stages: int

    def with_sides(self, br: int | None, bc: int | None, large: int) -> Launch:
        """The launch with sides that are set; a tile of more pairs than `large` needs the registers of eight warps."""
        br, bc = br or self.br, bc or self.bc
        return replace(self, br=br, bc=bc, warps=8 if br * bc > large else 4)

    def with_stages(self, fits: Callable[[Launch], bool]) -> Launch:
        """The launch with as many of its stages as fit, at least one."""
        fewer = (replace(self, stages=stages) for stages in range(self.stages, 1, -1))
        return next((each for each in fewer if fits(each)), replace(self, stages=1))


@dataclass(frozen=True)
class Launches:
    """The launch of the kernel for dK and dV, which keeps a block of keys, and of that for dQ, which keeps a block of rows."""

    keys: Launch
    rows: Launch


_PLACE = {"format", "head_dim", "mask", "generation"}
# If no entry of the table fits, the first of these that fits is used. The last fits 64 KB at every head_dim and format.
SAFE = (Launch(64, 32, 4, 2), Launch(32, 32, 4, 2), Launch(32, 16, 4, 2), Launch(16, 16, 4, 2), Launch(16, 16, 4, 1))
# Beyond d = 128, where O of 64 rows would take 128 or more registers of each thread of 4 warps.
SAFE_WIDE = (Launch(64, 64, 8, 2), Launch(64, 32, 8, 2), *SAFE[1:])
_SHORT_ROW = 128  # bytes of a key, up to which it takes 128 of them to keep the memory busy
FEW_ROWS = tuple(Launch(16, bc, 4, stages) for bc, stages in ((128, 3), (64, 3), (64, 2), (32, 2), (16, 2), (16, 1)))
INTERPRETED = Launch(32, 32, 4, 1)
ROWS = 64  # of a block that holds all queries of a head, or of heads that share k and v; of more, blocks of rows fill the GPU
STREAMED_ROWS = 16  # of such a block, up to which a program loads for longer than it computes
FEW_TILES = 16  # of keys, up to which neither a fourth stage nor wider tiles repay the longer wait for the first load
IDLE = 0.1  # share of the multiprocessors that may have no program
LARGE = 64 * 64  # pairs of a tile of a backward or instrumented kernel; a larger one needs the registers of eight warps
_LARGE_FORWARD = 128 * 128 - 1
_LARGE_OUTPUT = 64 * 128  # numbers of O of a block of few rows
_ALIGNED = 16  # bytes, by which compiled kernels differ
_PLANS = 256  # of an implementation


def choose(
    fmt: Format, head_dim: int, queries: int, mask: Mask, device: Device, br: int | None = None, bc: int | None = None
) -> Launch:
    """The entry of the table for a forward request; `br` and `bc` replace its sides.

    An entry is found by format, device generation, mask (causal or not) and the smallest head_dim that is not below the
    requested one. If there is none, or its tile does not fit into the shared memory of the device, the launch is the first of
    `SAFE` or `SAFE_WIDE` that fits; of `FEW_ROWS` for up to `few_rows` queries; and `INTERPRETED` without a GPU. With
    `br` or `bc`, the launch has as many stages as fit.
    """

    def fits(launch: Launch) -> bool:
        return device.holds(shared_bytes(launch, fmt, head_dim))

    preferred = _launches(fmt, head_dim, queries, mask, device)
    if br is None and bc is None:
        return next(filter(fits, preferred), preferred[-1])
    launch = replace(preferred[0].with_sides(br, bc, _LARGE_FORWARD), stages=2)
    if queries <= few_rows(fmt) and launch.br * head_dim > _LARGE_OUTPUT:
        launch = replace(launch, warps=8)
    return launch.with_stages(fits)


def streaming(launch: Launch, tiles: int, fits: Callable[[Launch], bool], most: int = 4) -> Launch:
    """A launch of `FEW_ROWS` for programs that meet so many tiles of keys, in as many stages, up to `most`, as pay and fit.

    Many tiles of more than 16 rows are 128 keys wide, if two stages of them fit.
    """
    if tiles <= FEW_TILES:
        return replace(launch, stages=2 if tiles == 1 else 3).with_stages(fits)
    launch = replace(launch, stages=most)
    wide = replace(launch, bc=max(launch.bc, 128)).with_stages(fits)
    return wide if launch.br > STREAMED_ROWS and wide.stages > 1 else launch.with_stages(fits)


def few_rows(fmt: Format) -> int:
    """The most rows that one block holds for a KV head; the keys of so few may be split. In FP32 products of 64 take too long."""
    return ROWS if fmt.bits <= 16 else STREAMED_ROWS


def _launches(fmt: Format, head_dim: int, queries: int, mask: Mask, device: Device) -> tuple[Launch, ...]:
    """The launches to try, in the order of preference."""
    if device.generation == "interpreter":
        return (INTERPRETED,)
    if queries <= few_rows(fmt):
        few, br = FEW_ROWS[1:] if head_dim * fmt.bits > 8 * _SHORT_ROW else FEW_ROWS, block_side(queries)
        return tuple(replace(each, br=br, warps=8 if br * head_dim > _LARGE_OUTPUT else 4) for each in few)
    place, safe = (fmt.name, mask_name(mask), device.generation), SAFE_WIDE if head_dim > 128 else SAFE
    rows = [row for row in table()["entries"] if (row["format"], row["mask"], row["generation"]) == place]
    row = min((row for row in rows if row["head_dim"] >= head_dim), key=lambda row: row["head_dim"], default=None)
    return safe if row is None else (Launch(row["br"], row["bc"], row["warps"], row["stages"]), *safe)


def shared_bytes(launch: Launch, fmt: Format, head_dim: int) -> int:
    """An upper bound on the shared memory of a forward launch, from what the compiler keeps there.

    Each stage holds a tile of K and one of V. In addition there are Q or P, whichever is larger, a maximum and a sum per row and
    warp, and for FP8 both tiles converted to FP16, in which they are multiplied.
    """
    br, bc, inner = (block_side(length) for length in (launch.br, launch.bc, head_dim))
    stored = max(8, fmt.bits) // 8
    operand = max(2, stored)
    tiles = 2 * launch.stages * bc * inner * stored
    converted = 2 * bc * inner * operand if stored < operand else 0
    return tiles + converted + max(br * inner * operand, br * bc * 4) + 4 * br * launch.warps


def block_side(length: int) -> int:
    """A side of a block in registers: a power of two."""
    return max(16, 1 << (length - 1).bit_length())


def mask_name(mask: Mask) -> str:
    """`causal` or `none`, which decides the shape of the loop."""
    return "causal" if mask.causal else "none"


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """The shipped file: entries, each with the command that found it, on which device and with which versions."""
    return read(TABLE)


def read(path: Path) -> dict[str, Any]:
    """A table from its file.

    Raises:
        BadInput: if the file holds no table.
    """
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
        if not all(_PLACE.issubset(entry) for entry in loaded["entries"]):
            raise KeyError("entries")
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput("out", str(path), f"it holds no table of launch settings ({error}); name another file") from None
    return loaded


@lru_cache(maxsize=1)
def digest() -> str:
    """Digest of the shipped table, since another table may change the bits of a result."""
    return hashlib.sha256(TABLE.read_bytes()).hexdigest()[:12]


def split_count(blocks: int, keys: int, bc: int, multiprocessors: int) -> int:
    """How many ranges of keys to use for `blocks` programs, and `keys` in tiles of `bc`.

    As many as possible without giving a multiprocessor a second program, and one more if more than a tenth of the
    multiprocessors would be idle; no range is shorter than a tile. One range if the blocks alone occupy the GPU. The split thus
    depends only on the shape and the device.
    """
    if blocks > (1 - IDLE) * multiprocessors:
        return 1
    splits = multiprocessors // blocks
    if blocks * splits < (1 - IDLE) * multiprocessors:
        splits += 1
    return max(1, min(splits, math.ceil(keys / bc)))


# By the largest head_dim.
_NARROW = {
    64: Launches(Launch(32, 128, 8, 2), Launch(128, 64, 8, 3)),
    128: Launches(Launch(32, 128, 8, 2), Launch(128, 64, 8, 2)),
    256: Launches(Launch(32, 32, 8, 1), Launch(64, 32, 8, 2)),
}
_WIDE = {
    64: Launches(Launch(32, 64, 8, 1), Launch(64, 32, 8, 1)),
    128: Launches(Launch(32, 32, 8, 1), Launch(32, 32, 4, 1)),
    256: Launches(Launch(16, 32, 8, 1), Launch(32, 16, 8, 1)),
}
_UNMASKED = Launch(64, 128, 8, 2)  # of dK and dV up to d = 64, where no tile needs the registers of a mask


def choose_backward(
    fmt: Format, head_dim: int, mask: Mask, device: Device, br: int | None = None, bc: int | None = None
) -> Launches:
    """The launches for a backward request; `br` and `bc` replace the sides of both kernels.

    A launch that does not fit into the shared memory of the device gets fewer stages; if that is not enough, the longer side of
    its tile is halved until it fits, but not one that was replaced.
    """
    table = _NARROW if fmt.bits <= 16 else _WIDE
    launches = Launches(INTERPRETED, INTERPRETED)
    if device.generation != "interpreter":
        launches = table[min(dim for dim in table if dim >= min(head_dim, max(table)))]
        if table is _NARROW and head_dim <= 64 and mask.is_none:
            launches = replace(launches, keys=_UNMASKED)

    def fitted(launch: Launch, of_rows: bool) -> Launch:
        def fits(each: Launch) -> bool:
            return device.holds(backward_shared_bytes(each, fmt, head_dim, of_rows))

        if br is not None or bc is not None:
            return launch.with_sides(br, bc, LARGE).with_stages(fits)
        launch = launch.with_stages(fits)
        while not fits(launch) and max(launch.br, launch.bc) > 16:
            longer = "br" if launch.br > launch.bc else "bc"
            launch = replace(launch, **{longer: getattr(launch, longer) // 2})
        return launch

    return Launches(fitted(launches.keys, False), fitted(launches.rows, True))


def backward_shared_bytes(launch: Launch, fmt: Format, head_dim: int, of_rows: bool) -> int:
    """An upper bound on the shared memory of a backward kernel, from what the compiler keeps there.

    It holds two tiles for the whole loop (k and v, or q and do if the kernel is `of_rows`), two for each stage, two more while
    their layout is converted, and P and dS.
    """
    br, bc, inner = (block_side(length) for length in (launch.br, launch.bc, head_dim))
    stored = 2 if fmt.bits <= 16 else 4
    resident, streamed = (br, bc) if of_rows else (bc, br)
    return 2 * (resident + (launch.stages + 1) * streamed) * inner * stored + br * bc * 4


class Plan(NamedTuple):
    """A call that was prepared for tensors of the same layout, and the kernel that it launches; it holds none of the tensors.

    `stages` are the two calls of which `run` consists, if the kernel reads other tensors than it is given.
    """

    run: Callable[..., Any]
    launch: KernelLaunch
    stages: tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Any]] | None = None


class Planned:
    """A frozen implementation that prepares a call once for each layout of its tensors: the launch is all that is left to do."""

    def prepared(self, *tensors: Tensor, mask: Mask, scale: float | None) -> Plan:
        """Whatever decides what runs: shapes, strides, dtypes, devices and alignment."""
        layouts = [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % _ALIGNED) for x in tensors]
        key = (*layouts, mask, scale)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            stored = self._stored
            own = stored(*tensors)
            plan = self._prepare(*own, mask, scale)
            if any(x is not y for x, y in zip(own, tensors, strict=True)):
                run = plan.run
                plan = plan._replace(run=lambda *own: run(*stored(*own)))
            self._plans[key] = plan
        return plan

    def _stored(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors of any dtype as the kernels take them; those that are so already are themselves."""
        return tensors

    def _prepare(self, *request: Any) -> Plan:
        """Make the plan of tensors, a mask and a scale; raises what the implementation raises."""
        raise NotImplementedError

    @cached_property
    def _plans(self) -> dict[Hashable, Plan]:
        return _plans_of(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_plans"}


@lru_cache(maxsize=64)
def _plans_of(settings: Planned) -> dict[Hashable, Plan]:
    """One for all that are equal: many are made for one call."""
    return {}


class Tables(LRUCache[tuple[Hashable, torch.device], Tensor]):
    """Returns the same tensor for the same key, so that neither a launch nor the capture of a CUDA graph copies to the GPU.

    A captured graph reads its tables at every replay, and does not signal its end: tables used by a capture are never evicted. Of
    the others, the least recently used is evicted beyond the capacity, after every launch on its device: one may read it.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._captured: dict[tuple[Hashable, torch.device], Tensor] = {}
        self._lock = threading.Lock()

    def popitem(self) -> tuple[tuple[Hashable, torch.device], Tensor]:
        slot, table = super().popitem()
        if slot[1].type == "cuda":
            torch.cuda.synchronize(slot[1])
        return slot, table

    def of(self, key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """The table of a key on a device; `make` creates it on the CPU.

        Raises:
            Unsupported: for a table that is not on the GPU yet while a CUDA graph is captured.
        """
        slot = key, device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            if slot in self._captured:
                return self._captured[slot]
            if slot not in self:
                if capturing:
                    why = "a CUDA graph cannot capture the copy of its tables to the GPU"
                    raise Unsupported("attention", f"{why}; call it once with these shapes before the capture")
                self[slot] = make().to(device)
            if capturing:
                self._captured[slot] = self[slot]
            return self[slot]


TABLES = Tables(256)
