"""Measurements: what is compared with what, over which replicates, and in which units; and studies, which store them.

No operation is named here.
"""
