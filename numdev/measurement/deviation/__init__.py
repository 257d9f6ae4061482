"""The kind of measurement `deviation`: a variant against golden and a baseline, by every metric of one pass over the difference.

The measurement is in `measurement`; how far one tensor is from another, in `metrics`, needs none.
"""
