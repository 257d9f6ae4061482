"""What the report knows of each study: a module declares the study's claims with their evidence, its figures and its section.

Rules of verdicts, drawing that several figures share, and the writing of files live elsewhere; no module here reads a file.
"""
