"""What scripts/demo.py is made of."""
