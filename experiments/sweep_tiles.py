"""Figure 6: the deviation over the block area, for swapped, square and the paper's own tiles.

Run: `python experiments/sweep_tiles.py [seeds=2] [device=cpu] [problem.n=256]`, from a checkout.
"""

import sys

from numdev.cli.main import main

if __name__ == "__main__":
    main(["measure", "--multirun", "study=fig6a,fig6b,fig6c", *sys.argv[1:]])
