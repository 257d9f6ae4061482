"""Figure 5: the deviation over the sequence length, at a fixed tile.

Run: `python experiments/sweep_length.py [seeds=2] [device=cpu] [problem.n=256]`, from a checkout.
"""

import sys

from numdev.cli.main import main

if __name__ == "__main__":
    main(["measure", "--multirun", "study=fig5a,fig5b", *sys.argv[1:]])
