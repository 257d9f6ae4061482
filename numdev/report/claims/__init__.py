"""What a claim is, the comparisons that several claims make, and the rules by which evidence becomes a verdict.

The claims of studies live in `numdev.report.studies`; nothing here draws or writes.
"""
