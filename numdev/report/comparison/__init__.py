"""Two sets of results side by side.

No claim is judged here.
"""
