# SPDX-License-Identifier: Apache-2.0
"""The documents and the API reference as a site: ./dev docs. Sphinx reads the Markdown files where they are."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
GENERATED = "build/docs"  # ./dev docs writes reference.md and python.md there

project = "Crossdock"
version = re.search(r"project\(crossdock VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Crossdock {version}"
html_show_copyright = False
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/tutorials/*.md", "docs/history/*.md", f"{GENERATED}/*.md"]
myst_heading_anchors = 4
# Links to sources and folders lead nowhere here; tests/docs/links.py checks all of them in the repository.
suppress_warnings = ["myst.xref_missing", "myst.header"]
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False

CONTENTS = {
    "Learn": ["docs/tutorials/moe_layer", "docs/tutorials/hang", "docs/tutorials/device_kernel"],
    "Use": ["README", "docs/guide", "docs/engines", "docs/device_api"],
    "Run": ["docs/deployment", "docs/troubleshooting", "SECURITY"],
    "Reference": [f"{GENERATED}/reference", f"{GENERATED}/python"],
    "Performance": ["docs/performance", "docs/scaling"],
    "Change": ["ARCHITECTURE", "CONTRIBUTING", "docs/protocol", "docs/plugin", "RELEASE", "CHANGELOG"],
    "Beside the product": ["docs/a2sgd"],
    "History": [
        "docs/history/low-latency",
        "docs/history/high-throughput",
        "docs/history/deep-ep-host-cost",
        "docs/history/network",
        "docs/history/a2sgd",
    ],
}


def add_contents(_app, name, source):
    """The start page has tables of links; the site's side bar needs lists of documents."""
    if name == root_doc:
        for caption, documents in CONTENTS.items():
            lines = "\n".join(f"/{document}" for document in documents)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def as_plain_text(_app, _what, _name, _object, _options, lines):
    """Docstrings are plain text: no sign in them is markup but "- " before an item of a list, and a block that is
    indented keeps its lines."""
    shown, inside, in_item = [], False, False
    for line in lines:
        is_item = line.startswith("- ")
        if is_item and not in_item:
            shown.append("")
        in_item = is_item or (in_item and line.startswith("  "))
        if in_item:
            shown.append(re.sub(r"([*|`_\\])", r"\\\1", line))
            continue
        is_indented = line.startswith(" ")
        if is_indented and not inside:
            shown += ["", "::", ""]
        elif not is_indented and inside and line.strip():
            shown.append("")
        inside = is_indented or (inside and not line.strip())
        shown.append(line if inside else re.sub(r"([*|`_\\])", r"\\\1", line))
    lines[:] = shown


def setup(app):
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", as_plain_text)
