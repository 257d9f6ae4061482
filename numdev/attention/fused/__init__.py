"""A tile's elementwise work in one compiled pass over each row: `Tiled` on a CPU at the speed of its two products.

Here lies what numba compiles, the rule that says when it runs, and the arrays that a policy becomes. The tensor path of
`numdev.attention.recurrence` is the specification, and the bits are its bits. Only `rounding`, `passes` and `entry` import numba,
and nothing that is imported with the package imports these.
"""
