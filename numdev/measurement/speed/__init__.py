"""The measurement of time, memory and traffic."""
