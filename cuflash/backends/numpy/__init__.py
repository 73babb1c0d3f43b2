"""Calls on NumPy arrays: tiles on the CPU, else the reference."""
