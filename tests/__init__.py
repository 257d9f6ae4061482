"""One file per module; what they are held against is in `tests.oracles`."""
