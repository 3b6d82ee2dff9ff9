# SPDX-License-Identifier: Apache-2.0
"""Makes SVG files of matplotlib small, in place: text as text, one decimal, no points that cannot be seen.

    slim SVG...

Groups that draw a text as shapes become one element, curves lose points closer than a quarter of a unit to what is
drawn without them, and every element has one line.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree as tree

SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
TOLERANCE = 0.25
PLACE = re.compile(r"translate\(([-\d.]+) ([-\d.]+)\)(?: rotate\(([-\d.]+)\))? scale\(([\d.]+) -[\d.]+\)")
NUMBER = re.compile(r"-?\d+\.\d+")


def rounded(text):
    return NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), text)


def simplified(points):
    """Douglas and Peucker's way, without recursion."""
    keep, pieces = {0, len(points) - 1}, [(0, len(points) - 1)]
    while pieces:
        first, last = pieces.pop()
        (x0, y0), (x1, y1) = points[first], points[last]
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
        off = [
            (abs((x - x0) * (y1 - y0) - (y - y0) * (x1 - x0)) / length, i)
            for i, (x, y) in enumerate(points[first + 1 : last], first + 1)
        ]
        distance, middle = max(off, default=(0, 0))
        if distance > TOLERANCE:
            keep.add(middle)
            pieces += [(first, middle), (middle, last)]
    return [points[i] for i in sorted(keep)]


def path(text):
    """The path's commands on one line; a chain of lines with fewer points."""
    words = text.split()
    chain = re.fullmatch(r"\s*M ([-\d.e]+) ([-\d.e]+)\s*(L [-\d.e]+ [-\d.e]+\s*)+", text)
    if chain:
        numbers = [float(word) for word in words if word not in "ML"]
        points = simplified(list(zip(numbers[::2], numbers[1::2], strict=True)))
        text = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return rounded(" ".join(text.split()))


def text_of(group):
    """The element for a group that holds a comment with a text and the shapes of its letters, or None."""
    comment = next((child for child in group if child.tag is tree.Comment), None)
    shapes = group.find(f"{SVG}g")
    place = shapes is not None and PLACE.fullmatch(shapes.get("transform", ""))
    if comment is None or not place:
        return None
    x, y, turn, scale = place.groups()
    element = tree.Element(f"{SVG}text", {"font-size": f"{float(scale) * 100:g}"})
    where = f"translate({x} {y})" + (f" rotate({turn})" if turn else "")
    element.set("transform", rounded(where))
    words = re.sub(r"\$?\\mathdefault\{(.*)\}\$?", r"\1", comment.text.strip())
    element.text = re.sub(r"10\^\{(-?\d+)\}", r"1e\1", words)  # mathtext of a logarithmic axis
    return element


def cleaned(element, used):
    """The element with what is needed of it, or None."""
    if element.tag in (tree.Comment, f"{SVG}metadata", f"{SVG}style"):
        return None
    if element.tag == f"{SVG}g" and (text := text_of(element)) is not None:
        return text
    children = [child for child in (cleaned(child, used) for child in element) if child is not None]
    if element.tag in (f"{SVG}g", f"{SVG}defs") and not children:
        return None
    if element.tag == f"{SVG}g" and len(children) == 1 and not set(element.keys()) - {"id"}:
        return children[0]
    kept = tree.Element(element.tag)
    for key, value in element.items():
        if key == "d":
            value = path(value)
        elif key == f"{XLINK}href":
            value = "".join(value.split())
        elif key == "style":
            value = value.replace(": ", ":").replace("; ", ";")
        elif key == "id" and value not in used:
            continue
        kept.set(key, rounded(value) if key not in ("d", "id", f"{XLINK}href") else value)
    kept.text = element.text.strip() if element.text else None
    kept.extend(children)
    return kept


def lines_of(element):
    """An element per line, what only groups them on lines of their own."""
    if element.tag in (f"{SVG}svg", f"{SVG}g") and len(element):
        shell = tree.Element(element.tag, element.attrib)
        opening, closing = tree.tostring(shell, "unicode", short_empty_elements=False).rsplit("</", 1)
        yield opening
        for child in element:
            yield from lines_of(child)
        yield "</" + closing
    else:
        yield tree.tostring(element, "unicode")


def slim(text):
    root = tree.fromstring(text, tree.XMLParser(target=tree.TreeBuilder(insert_comments=True)))
    used = set(re.findall(r'(?:href="#|url\(#)([\w-]+)', text))
    for prefix, name in (("", SVG), ("xlink", XLINK)):
        tree.register_namespace(prefix, name[1:-1])
    root = cleaned(root, used)
    root.set("font-family", "sans-serif")
    for size in ("width", "height"):
        root.set(size, root.get(size).removesuffix("pt"))
    lines = list(lines_of(root))
    names = (' xmlns="http://www.w3.org/2000/svg"', ' xmlns:xlink="http://www.w3.org/1999/xlink"')
    for name in names:
        lines = [line.replace(name, "") for line in lines]
    return "\n".join([lines[0].replace("<svg", "<svg" + "".join(names), 1), *lines[1:]]) + "\n"


def main(files):
    if not files:
        sys.exit(__doc__)
    for name in files:
        file = pathlib.Path(name)
        file.write_text(slim(file.read_text()))
