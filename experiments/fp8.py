"""FlashAttention-3's Table 3: FP16 and FP8 attention on inputs with outliers.

Run: `python experiments/fp8.py [seeds=2] [device=cpu] [problem.n=256]`, from a checkout.
"""

import sys

from numdev.cli.main import main

if __name__ == "__main__":
    main(["measure", "--multirun", "study=fa3_table3", *sys.argv[1:]])
