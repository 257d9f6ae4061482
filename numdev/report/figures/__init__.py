"""Figures: style, panels and labels that several share, and the figures of the notebooks.

The figures of studies live in `numdev.report.studies`; nothing here reads a file.
"""
