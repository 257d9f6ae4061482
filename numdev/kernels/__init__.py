"""Kernels in Triton: the only part of numdev that imports it, and only when a kernel is asked for."""
