"""``python -m cuflash check``: this machine's kernels beside exact results.

Calls of every family are compared element by element with the same calls in
float64 on NumPy arrays, within the bounds of docs/guide/accuracy.md. Users
run it on their own GPU, from an installed package.
"""
