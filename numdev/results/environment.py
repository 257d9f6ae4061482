"""Where a measurement is made: the device, all that may change a bit of a result, and cores and memory that can be used."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy
import torch

from numdev.errors import BadInput
from numdev.sources import digest as sources_digest
from numdev.sources import package_version

sources_digest()  # now, while the sources are imported, and not when a session first measures

_PATHS = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY"),
    *("ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
)
"""Variables that choose the instructions by which MKL, OpenBLAS (NumPy's, so that of Triton's interpreter), torch's own
operations and oneDNN compute on a CPU, and whether oneDNN may multiply FP32 in fewer bits."""
_GPU_PATHS = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")  # whether TF32 may be used; which kernels cuBLAS takes
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one, else the CPU; `cpu` and `cuda` are themselves.

    Raises:
        BadInput: for another name, or for `cuda` where torch finds no GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise BadInput("device", name, "use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device", name, "torch finds no CUDA device here; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def environment(device: torch.device) -> dict[str, str]:
    """Everything that may change a bit of a result or explain a difference, as text.

    A product's order of summation depends on the processor, on the instructions and threads that BLAS uses, and on its version.
    `sources` are those of numdev that compute (`numdev.sources`). `revision` alone changes no bit, and is part of no key
    (`numdev.results.record.key_of`). An operation adds its own facts. What can be set is read at every call.
    """
    facts = {
        "numdev": package_version(),
        "revision": _revision(),
        "sources": sources_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()}-{platform.machine()}",
        "device": "cpu",
        "vendor": _cpuinfo("vendor_id", "CPU implementer"),
        "processor": _cpuinfo("model name", "CPU part"),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "blas": _blas(),
        "numpy_blas": _numpy_blas(),
    }
    facts |= {name: os.environ.get(name) or "unset" for name in _PATHS}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts |= {name: os.environ.get(name) or "unset" for name in _GPU_PATHS}
    return facts


def usable_cores() -> int:
    """Physical cores, no more than processors of its affinity, nor than a container gives it time for."""
    import psutil  # late, as below: few of those who read results measure

    cores = psutil.cpu_count(logical=False) or 1
    if sys.platform == "linux":
        cores = min(cores, len(os.sched_getaffinity(0)))
    if _QUOTA.is_file():
        quota, _, period = _QUOTA.read_text().strip().partition(" ")  # `150000 100000`, or `max 100000`
        cores = cores if quota == "max" else min(cores, int(quota) // int(period or 100_000))
    return max(cores, 1)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device, without swapping on a CPU."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # what the allocator caches is free
        return int(torch.cuda.mem_get_info(device)[0]) + held
    import psutil

    return psutil.virtual_memory().available


@lru_cache
def _cpuinfo(*names: str) -> str:
    """A fact that the system states of the first processor, under the first of these names that it knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return next((facts[name] for name in names if facts.get(name)), platform.processor() or "unknown")


@lru_cache(maxsize=1)
def _blas() -> str:
    """Vendor and version of the libraries that torch multiplies matrices with on a CPU."""
    built = torch.__config__.show()
    vendor = re.search(r"BLAS_INFO=([^,\s]+)", built)
    libraries = [vendor[1] if vendor else "unknown"]
    for name, pattern in (("MKL", r"Math Kernel Library Version (\S+)"), ("oneDNN", r"MKL-DNN (v\S+)")):
        if version := re.search(pattern, built):
            libraries.append(f"{name} {version[1]}")
    return ", ".join(libraries)


@lru_cache(maxsize=1)
def _numpy_blas() -> str:
    """Vendor and version of NumPy's, by which Triton's interpreter multiplies."""
    blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', 'unknown')}"


@lru_cache(maxsize=1)
def _revision() -> str:
    """The git revision of a checkout, with `-dirty` where tracked files differ; `none` for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "none"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return answer.stdout.strip() if answer.returncode == 0 else "none"
