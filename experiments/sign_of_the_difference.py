"""Is tiled attention better or worse than the baseline? The sign follows from the precision policy.

Run: `python experiments/sign_of_the_difference.py [seeds=2] [device=cpu] [problem.n=256]`, from a checkout.
"""

import sys

from numdev.cli.main import main

if __name__ == "__main__":
    main(["measure", "--multirun", "study=sign", *sys.argv[1:]])
