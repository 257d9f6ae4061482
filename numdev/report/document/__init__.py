"""Files: tables, the PDF and its sections.

What they say is computed elsewhere in the report.
"""
