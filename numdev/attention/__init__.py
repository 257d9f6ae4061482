"""The operation: problem, mask, policy, tiling and recurrence; exact and emulated implementations, which never import each other.

Nothing here measures, keeps results, reports, or knows the command line; `operation` declares what those must know of attention.
"""
