"""What is claimed, the evidence for it in a study, and the rules by which evidence becomes a verdict.

Nothing is drawn or written here.
"""
