"""Kernels of others as variants: PyTorch, FlexAttention, and a function of the user.

Each proves which kernel ran; none knows another.
"""
