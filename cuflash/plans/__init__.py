"""What `cuflash.plan` decides from: how each family's kernels are planned."""
