# SPDX-License-Identifier: Apache-2.0
"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """One line per row, cells padded to the column's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{'>' if right else '<'}{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of numbers, right-aligned."""
    head, *lines = aligned([headings, *rows], right=True)
    print("\n".join([title, "", head, "-" * len(head), *lines, ""]))
