"""Estimates, intervals and tests over replicates.

Nothing here knows a study or a claim.
"""
