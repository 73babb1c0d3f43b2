"""What scripts/fuzz_gpu.py is made of."""
