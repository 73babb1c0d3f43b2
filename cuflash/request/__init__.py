"""What was asked: the options, checked requests, and their layouts."""
