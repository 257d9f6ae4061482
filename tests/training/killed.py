"""Train, be killed, and again: `python -m tests.training.killed FOLDER` prints the last checkpoint of each process."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from numdev.training import loop
from numdev.training.run_files import sealed
from numdev.training.rung import Numerics
from tests.training.toy import toy, trained

KILLS = 3


def main(folder: Path) -> None:
    """Forks, so that torch is imported once, with all that the first run of a process waits for."""
    torch.set_num_threads(1)
    loop._CHECKPOINT_SECONDS = 0.0
    with tempfile.TemporaryDirectory() as first:
        trained(toy(1, Numerics.FP16), Path(first))
    draw = random.Random(0)
    for _ in range(KILLS):
        before = set(sealed(folder, "checkpoint").values())
        child = os.fork()
        if not child:
            trained(toy(40, Numerics.FP16), folder)
            os._exit(0)
        while set(sealed(folder, "checkpoint").values()) <= before:
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            return
        print(max(sealed(folder, "checkpoint")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
