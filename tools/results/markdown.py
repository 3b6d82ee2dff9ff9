# SPDX-License-Identifier: Apache-2.0
"""Pieces of the documents' tables."""

import re


def us(value):
    """Three significant figures, up to whole microseconds."""
    return "-" if value is None else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def table(headings, rows):
    """Lines of a table; a heading that ends in `:` is of numbers."""

    def line(cells):
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    rule = "|" + "|".join("---:" if heading.endswith(":") else "---" for heading in headings) + "|"
    return [line(heading.rstrip(":") for heading in headings), rule, *map(line, rows), ""]


def wrap(text, width=118):
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines + [""]


def replaced(text, name, lines):
    """The document with these lines between `<!-- NAME begin -->` and `<!-- NAME end -->`."""
    pattern = re.compile(rf"(<!-- {name} begin -->\n).*?(<!-- {name} end -->)", re.DOTALL)
    fresh, found = pattern.subn(lambda match: match[1] + "\n".join(["", *lines]) + "\n" + match[2], text)
    if found != 1:
        raise ValueError(f"the marks of '{name}' stand {found} times in the document, expected: once")
    return fresh
