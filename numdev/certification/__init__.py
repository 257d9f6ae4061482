"""Certificates: whether a kernel is as accurate as its number formats permit, and if not, which step errs."""
