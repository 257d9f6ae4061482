"""The Triton and Gluon kernels and what launches them.

Triton is imported nowhere else; from the rest of attention only value objects are imported.
"""
