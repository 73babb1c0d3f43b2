"""What runs calls: CuPy's GPU, an emulated one, the NumPy reference."""
