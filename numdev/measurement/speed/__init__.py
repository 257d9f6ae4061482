"""The measurement of time, memory and traffic.

Deviation stands beside it in the folder above; tables and figures of speed belong to the report.
"""
