"""What calls planned; counts of drawn ones, if CUFLASH_TRIED names a folder.

Each process writes a file there, which `scripts/fuzz.py --merge` adds to
docs/fuzz.json. Each plan of a call on the emulator counts: a backward pass
after a forward pass is two problems.
"""

import os
from datetime import datetime, timezone
from pathlib import Path

from fuzz_parts import tally

FOLDER = os.environ.get("CUFLASH_TRIED")
DIRECTIONS = {"kvcache": "forward_kvcache"}
NUMBERS = "causal", "window", "softcap", "dropout", "deterministic"
PLANNED = []  # (direction, family) of the calls of an example
COUNTED = tally.Tally(
    "tests",
    os.environ.get("CUFLASH_COMMIT", "unknown"),
    datetime.now(timezone.utc).date().isoformat(),
)


def noting(plan):
    """Return a function that plans, and notes what."""

    def noted(problem, *others):
        decided = plan(problem, *others)
        PLANNED.append((problem.direction, decided.family))
        return decided

    return noted


def family(direction):
    """Return the family of the last plan of a direction."""
    return dict(PLANNED).get(direction, "none")


def note(case):
    """Count the calls of an example, which ended well."""
    if FOLDER:
        options = [x for x in NUMBERS if getattr(case, x, None)]
        arrays = (x.removesuffix("_of_batches") for x in case.arrays_of)
        options += [x for x in arrays if x != "segment_ids_k"]
        options += ["cu_seqlens_q"] * bool(getattr(case, "offsets", None))
        for direction, family in PLANNED:
            COUNTED.add({
                "family": family,
                "direction": DIRECTIONS.get(direction, direction),
                "dtype": case.dtype,
                "precision": getattr(case, "precision", None),
                "options": options,
                "values": case.values,
                "layout": case.layout,
            })  # fmt: skip


def write():
    """Add this process's counts to its file."""
    if FOLDER and COUNTED.problems:
        path = Path(FOLDER) / f"tests_{os.getpid()}.json"
        tally.add_to(path, COUNTED.record())
