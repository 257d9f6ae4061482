"""Results on disk: records, the store, studies, and the environment that they came from.

Nothing here measures or draws.
"""
