"""What users call: signatures, docstrings, and the flow of each call."""
