"""Functions that the files of studies name for what their words cannot say: figures, evidence for claims, tables.

`registry` reads those files (`configs/study`), and no other module here reads any. Rules of verdicts and drawing that all figures
share live elsewhere.
"""
