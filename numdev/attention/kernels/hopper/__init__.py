"""Kernels of both passes for Hopper GPUs, in Gluon, and what launches them.

`launch` and `order` import no Triton: an implementation asks them before it loads a kernel.
"""
