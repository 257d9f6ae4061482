"""Kernels of others as variants: PyTorch, FlexAttention, and a function of the user.

Each checks by the profiler which kernel ran; none imports another.
"""
