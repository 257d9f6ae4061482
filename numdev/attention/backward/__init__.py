"""The backward pass: its policy, how it recomputes P and delta, and its exact, naive and tiled implementations.

`operation` declares what a measurement must know of gradients.
"""
