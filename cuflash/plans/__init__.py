"""The plans of each family's kernels, for `cuflash.plan`."""
