"""Claims: what they say, the evidence that rows give for what a study's file states, and the rules by which it becomes a verdict.

Which claims there are, the files of studies state; nothing here draws or writes.
"""
