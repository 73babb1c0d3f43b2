"""A user's own score and mask, from trace to text; nothing so far."""
