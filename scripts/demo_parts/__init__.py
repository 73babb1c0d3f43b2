"""The parts of scripts/demo.py."""
