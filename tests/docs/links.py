# SPDX-License-Identifier: Apache-2.0
"""Every link of a document leads to a file or folder that is there and, with #, to one of its headings. Every file that
a comment of the C++ sources names is there."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
LINK = re.compile(r"\]\(([A-Za-z0-9_./-]*)(?:#([^)\s]+))?\)")


def prose(path):
    """The document's lines outside of code blocks."""
    inside = False
    for line in path.read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield line


def anchors(path):
    """As GitHub makes them: of the second heading of one name, NAME-1."""
    found = {}
    for line in prose(path):
        if line.startswith("#"):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip())
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            number = found.get(name, -1) + 1
            found[name] = number
            yield f"{name}-{number}" if number else name


FOLDERS = ("bench", "docs", "examples", "fuzz", "include", "plugin", "python", "src", "tests", "tools")
COMMENT = re.compile(r"(?://| \*)(.*)")
FILE = re.compile(r"(?<![\w.])[\w/]+\.(?:h|hpp|cpp|cu|cuh|py|md)\b")


def unknown_in_comments():
    """With their places. A file may be named by the end of its path."""
    files = [*ROOT.glob("*.*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))]
    ends = set()
    for path in files:
        parts = path.relative_to(ROOT).parts
        ends |= {"/".join(parts[i:]) for i in range(len(parts))}
    for path in files:
        if path.suffix not in (".h", ".hpp", ".cpp", ".cu", ".cuh"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            comment = COMMENT.search(line)
            for name in FILE.findall(comment.group(1)) if comment else ():
                if name not in ends:
                    yield f"{path.relative_to(ROOT)}:{number} names {name}, which is not there"


def main():
    documents = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob(".github/**/*.md"),
        *ROOT.glob("tests/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
    wrong = list(unknown_in_comments())
    for document in documents:
        for name, anchor in LINK.findall("\n".join(prose(document))):
            target = (document.parent / name).resolve() if name else document
            if not target.exists():
                wrong.append(f"{document.relative_to(ROOT)}: there is no {name}")
            elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
                wrong.append(f"{document.relative_to(ROOT)}: {name} has no heading #{anchor}")
    print("\n".join(wrong) or f"ok: {len(documents)} documents")
    sys.exit(bool(wrong))


main()
