"""Files and the terminal: tables, figures as PNG and SVG, the PDF.

What they say is computed elsewhere in the report.
"""
