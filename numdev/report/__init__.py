"""The report: tables, figures and verdicts on claims, made from stored results and nothing else.

Nothing is imported here: pandas and matplotlib cost more than the rest of numdev, and only a report needs them.
"""
