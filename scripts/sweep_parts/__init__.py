"""The parts of scripts/sweep_blocks.py."""
