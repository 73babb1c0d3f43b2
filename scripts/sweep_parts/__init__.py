"""What scripts/sweep_blocks.py is made of."""
