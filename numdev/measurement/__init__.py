"""Measurements: what is compared with what, over which replicates, and in which units.

No operation is named here, and nothing is written to disk.
"""
