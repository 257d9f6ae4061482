"""Kernels of others as variants: PyTorch, FlexAttention, FlashAttention, SageAttention, and a function of the user.

Each checks by the profiler which kernel ran. None calls another; PyTorch has the tiles of FlashAttention-2.
"""
