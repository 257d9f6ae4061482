"""A tile's elementwise work in compiled passes over its rows: `Tiled` and `TiledBackward` on a CPU, optional, with the same bits.

`rules` says which runs the passes take, `passes` is what numba compiles, `run` takes a run through them. Only `passes` imports
numba, and nothing that is imported with the package imports it. Without numba tensor operations run.
"""
