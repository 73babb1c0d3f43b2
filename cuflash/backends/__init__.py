"""What runs calls: CuPy's GPU, an emulated one, NumPy on the CPU."""
