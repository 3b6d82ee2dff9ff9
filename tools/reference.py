#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the API reference, in Markdown, from the comments and declarations of the public headers.

    reference.py OUT.md

A comment that stands directly before a declaration is its text, which follows the declaration. A line `---- Title ----`
in a comment starts a section. The comments of members stay in the code; private members are left out. In a text, lines
that begin like `name: ...` and lines with indented ones below them become items of a list, and so do the indented lines
below one that ends with a colon. Nothing else is understood, and nothing is lost.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = [
    "nccl_ep.h",
    "nccl_ep/ep_enums.h",
    "nccl_ep/common.hpp",
    "crossdock.h",
    "crossdock/simulation.h",
    "crossdock/a2sgd.h",
    "crossdock/error.hpp",
    "crossdock/communicator.hpp",
    "crossdock/tensor.hpp",
    "crossdock/group.hpp",
    "crossdock/overlap.hpp",
]
SECTION = re.compile(r"^-{3,} *(.+?) *-{3,}$")

# Guards, includes and the extern "C" frame say nothing to a reader.
FRAME = re.compile(
    r"""^(\#ifndef\ \w+_H(PP)?_\n\#define\ \w+_H(PP)?_ | \#endif\ .*_H(PP)?_.* | \#include\ .* |
        (?P<guarded>\#if\ defined\(__GNUC__\)\n)?\#pragma\ GCC\ visibility\ .*(?(guarded)\n\#endif) |
        \#ifdef\ __cplusplus\n(extern\ "C"\ \{|\})\n\#endif | namespace\ \w+\ \{ | (//.*\n)?inline\ namespace\ \w+\ \{ |
        \}\ +//\ namespace.*)$""",
    re.MULTILINE | re.VERBOSE,
)

# The name that a declaration introduces: the first of these that is found.
NAMES = [
    r"^class (\w+)",
    r"\}\s*(\w+)\s*;",
    r"typedef[^;{]*?\(\*(\w+)\)",
    r"^#define +(\w+)",
    r"(\w+)\s*\([^;{]*\)\s*[;{]",
    r"typedef[^;{]*?(\w+)\s*;",
]


def paragraphs(text):
    """Yields runs of lines between blank lines; a blank line inside braces or a comment does not count."""
    paragraph, depth, in_comment = [], 0, False
    for line in text.splitlines() + [""]:
        if not line.strip() and depth == 0 and not in_comment:
            if paragraph:
                yield paragraph
            paragraph = []
            continue
        paragraph.append(line.rstrip())
        if not paragraph[0].lstrip().startswith("//") or not line.startswith("//"):
            in_comment = (in_comment or line.startswith("/*")) and "*/" not in line
            depth += line.count("{") - line.count("}")
    if paragraph:
        raise ValueError(f"a brace or a comment is not closed: {paragraph[0]}")


def split_comment(paragraph):
    """The leading comment's text, and the code that follows it."""
    text, in_comment = [], False
    for index, line in enumerate(paragraph):
        if not in_comment and not line.startswith(("//", "/*")):
            return text, paragraph[index:]
        in_comment = (in_comment or line.startswith("/*")) and "*/" not in line
        text.append(re.sub(r" *\*/ *$", "", re.sub(r"^(// ?|/\* ?| \*(?!/) ?| \*/)", "", line)))
    return text, []


def title_of(code):
    bare = re.sub(r"//.*|/\*.*?\*/", "", "\n".join(code))
    for name in NAMES:
        found = re.search(name, bare, re.MULTILINE)
        if found:
            return found.group(1)
    return None


# A line that opens an item of a list: a name or a mode, and a colon.
OPENS_ITEM = re.compile(r"^(nccl[A-Z]\w+|HT|LL[\w -]*|NVFP4 \(LL\)|[a-z_]+|Data types): ")


def indent(line):
    return len(line) - len(line.lstrip())


def with_lists(lines):
    """Indented lines below one that ends with a colon, as Markdown's items: `- text`, or `NAME  text` of a table."""
    out, index = [], 0
    while index < len(lines):
        line = lines[index]
        out.append(line)
        index += 1
        following = lines[index] if index < len(lines) else ""
        is_row = re.match(r" +(- |\S+(?: \S+)*  +\S)", following)
        if not line.rstrip().endswith(":") or not is_row or indent(following) <= indent(line):
            continue
        base, inside = indent(following), "  " if line.startswith("- ") else ""
        if not inside:
            out.append("")
        while index < len(lines) and lines[index].strip() and indent(lines[index]) >= base:
            row = lines[index].strip()
            if indent(lines[index]) > base:
                out.append(f"{inside}  {row}")
            elif row.startswith("- "):
                out.append(inside + row)
            else:
                out.append(inside + "- " + re.sub(r"^(\S+(?: \S+)*)  +", r"\1: ", row))
            index += 1
        if not inside:
            out.append("")
    return out


def prose_of(lines, anchors):
    """Markdown that looks as the comment was meant: items, escaped signs, names as code and, where known, as links."""

    def name(found):
        word = found.group(0)
        target = word.removesuffix("()")
        return f"[`{word}`](#{target.lower()})" if target in anchors else f"`{word}`"

    lines = with_lists(lines)
    for index, line in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        if line.startswith("    "):  # code
            yield line
            continue
        is_item = (
            re.match(r"[^ -]", line)
            and not line.endswith(":")
            and (OPENS_ITEM.match(line) or re.match(r"  [^ -]", following))
        )
        line = re.sub(r"([*<|])", r"\\\1", line)
        line = re.sub(r"\b\w+->\w+(\[\w+\])?", r"`\g<0>`", line)  # a field is code, and stays on one line
        line = re.sub(r"\b(ncclEp|crossdock)[A-Z]\w+(\(\))?|\b(NCCL|CROSSDOCK)_\w+\b", name, line)
        yield "- " + line if is_item else line


def describe(header, anchors):
    yield f"## {header}\n"
    text = FRAME.sub("", (ROOT / "include" / header).read_text())
    for paragraph in paragraphs(text):
        comment, code = split_comment(paragraph)
        sections = [SECTION.match(line.strip()) for line in comment]
        for section in filter(None, sections):
            yield f"### {section.group(1)}\n"
        prose = [line for line, section in zip(comment, sections, strict=True) if not section and "SPDX-" not in line]
        # Macros without a comment are what their section says.
        if code and title_of(code) and (any(prose) or not code[0].startswith("#")):
            yield f"#### {title_of(code)}\n"
        if code:
            public = re.sub(r"\n+  private:\n.*?(?=\n\};)", "", "\n".join(code), flags=re.DOTALL)
            yield f"```{'cpp' if header.endswith('.hpp') else 'c'}\n{public}\n```\n"
        if any(prose):
            yield "\n".join(prose_of(prose, anchors)).strip("\n") + "\n"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    heading = re.compile(r"^#### (\w+)$", re.MULTILINE)
    # Once to learn the names, once more with links to them.
    anchors = {name for header in HEADERS for name in heading.findall("\n".join(describe(header, set())))}
    pages = ["\n".join(describe(header, anchors)) for header in HEADERS]
    for header, page in zip(HEADERS, pages, strict=True):
        if not heading.search(page):
            sys.exit(f"reference.py finds no declaration in include/{header}")
    index = [
        f"- [{header}](#{re.sub('[^a-z0-9_-]', '', header.lower())}): "
        + ", ".join(f"[{name}](#{name.lower()})" for name in heading.findall(page) if not name.isupper())
        for header, page in zip(HEADERS, pages, strict=True)
    ]
    out.write_text(
        "<!-- Made from the public headers by tools/reference.py. -->\n\n# C and C++\n\n"
        + "\n".join(index)
        + "\n\n"
        + "\n".join(pages)
    )
    print(f"{out}: {len(anchors)} declarations of {len(HEADERS)} headers")


main()
