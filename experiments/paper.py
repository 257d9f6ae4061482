"""Every study of the paper, then its report: `numdev paper`.

Run: `python experiments/paper.py [seeds=2] [device=cpu] [studies=[fig3,fig4]]`, from a checkout.
"""

import sys

from numdev.cli.main import main

if __name__ == "__main__":
    main(["paper", *sys.argv[1:]])
