"""Stored results as tidy tables, and the dictionary of their columns.

No statistic is computed and nothing is drawn here.
"""
