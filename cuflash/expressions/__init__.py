"""A user's own score and mask: recorded once, then text, NumPy, intervals."""
