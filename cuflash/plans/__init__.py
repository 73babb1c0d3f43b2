"""What was decided: kernels, tiles and workspace of each problem."""
