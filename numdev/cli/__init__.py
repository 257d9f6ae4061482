"""The command line: `numdev measure`, `paper`, `report`, `studies`. Nothing outside this package knows Hydra."""
