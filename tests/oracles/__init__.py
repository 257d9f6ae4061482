"""Independent statements of what numdev computes, written to be obviously right rather than fast."""
