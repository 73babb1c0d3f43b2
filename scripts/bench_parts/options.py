"""Help texts shared by bench.py and sweep_blocks.py."""

from __future__ import annotations

import argparse


class WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that appends an option's default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None:
            return action.help
        return super()._get_help_string(action)


def in_words(value: int | tuple[int, ...]) -> str:
    """A default as the user would type it."""
    return " ".join(map(str, value if isinstance(value, tuple) else [value]))
