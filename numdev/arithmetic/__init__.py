"""Numbers: formats, casts, rounded operations, products, quantised and microscaled tensors.

No operation is known here: nothing in this folder imports from another folder of the package.
"""
