"""The parts of scripts/fuzz_gpu.py."""
