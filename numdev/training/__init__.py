"""Training: what is trained, how a run differs, and what that does to the weights; attention exchanged under a model.

It knows measurements and attention; neither of them knows it, and nothing here reads the command line or makes a report.
"""
