"""Implementations of attention, one per module; they never import each other."""
