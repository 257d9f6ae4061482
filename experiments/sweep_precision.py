"""Figures 3 and 4: the deviation of tiled and of baseline attention over number formats.

Run: `python experiments/sweep_precision.py [seeds=2] [device=cpu] [problem.n=256]`, from a checkout.
"""

import sys

from numdev.cli.main import main

if __name__ == "__main__":
    main(["measure", "--multirun", "study=fig3,fig4", *sys.argv[1:]])
