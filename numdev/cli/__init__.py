"""The command line: `numdev measure`, `paper`, `report`, `speed`, `studies`, `compare`.

Nothing outside this folder knows Hydra, and nothing here computes a figure.
"""
