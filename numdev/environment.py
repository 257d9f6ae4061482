"""Where a measurement was made."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path

import numpy
import torch

from numdev.errors import BadInput
from numdev.kernels.launch import digest
from numdev.kernels.runtime import interpreting, triton_version
from numdev.version import package_version


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one, else the CPU; `cpu` and `cuda` are taken at their word.

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

    The number of threads is part of it: it can change the order of a summation. It is read at every call, since it can be set.
    """
    facts = {
        "numdev": package_version(),
        "revision": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()}-{platform.machine()}",
        "device": "cpu",
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "float32_matmul": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["triton"] = triton_version()
    elif interpreting():
        facts["triton"] = f"{triton_version()} interpreted"
    if "triton" in facts:
        facts["launch_table"] = digest()
    return facts


@lru_cache(maxsize=1)
def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


@lru_cache(maxsize=1)
def _revision() -> str:
    """The git revision of a checkout, with `-dirty` where tracked files differ; `none` for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return "none"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return answer.stdout.strip() if answer.returncode == 0 else "none"
