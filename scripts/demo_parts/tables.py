"""Tables on the terminal."""

from __future__ import annotations

from rich.table import Table


def plain_table(*headings):
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    return table
