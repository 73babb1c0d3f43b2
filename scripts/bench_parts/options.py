"""What bench.py and sweep_blocks.py say of their options."""

from __future__ import annotations

import argparse


class WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Names an option's default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None:
            return action.help
        return super()._get_help_string(action)


def in_words(value: int | tuple[int, ...]) -> str:
    """A default, as it would be typed."""
    return " ".join(map(str, value if isinstance(value, tuple) else [value]))
