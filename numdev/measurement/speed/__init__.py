"""The kind of measurement `speed`: time, memory and traffic of a variant, with its deviation on a sample.

Tables and figures of speed are in the report.
"""
