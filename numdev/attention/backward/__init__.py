"""The backward pass: its policy, how it recomputes P and delta, and its exact, naive and tiled implementations.

Nothing here measures or runs a kernel; `operation` declares what a measurement must know of gradients.
"""
