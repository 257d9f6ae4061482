"""RMSNorm (Zhang & Sennrich 2019) as an operation that numdev measures: an example of what lives outside the package."""
