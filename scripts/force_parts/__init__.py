"""Parts of scripts/train_forces.py."""
