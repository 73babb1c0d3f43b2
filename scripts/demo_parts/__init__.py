"""The parts of scripts/demo.py, and of scripts/generate.py."""
