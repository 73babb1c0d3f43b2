"""The parts of scripts/fuzz.py."""
