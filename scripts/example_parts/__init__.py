"""The parts of scripts/run_examples.py."""
