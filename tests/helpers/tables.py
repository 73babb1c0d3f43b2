"""Tile tables for tests."""

import json

from cuflash.plans import tiles

# Tiles that sm80's forward kernel is written for, by their block_k.
BY_BLOCK_K = {k: {"block_q": 64, "block_k": k, "num_warps": 4}
              for k in (16, 32, 64, 128)}  # fmt: skip


def entry(**changes):
    """A line of a table: sm80's forward pass, 64 columns."""
    return {
        "family": "sm80",
        "direction": "forward",
        "head_dim": 64,
        "tile": {"block_q": 64, "block_k": 64, "num_warps": 4},
        **changes,
    }


def write_table(folder, arch, *entries):
    """Write a table and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{arch}.json"
    content = {"format": tiles.FORMAT, "arch": arch, "tiles": entries}
    path.write_text(json.dumps(content))
    return path
