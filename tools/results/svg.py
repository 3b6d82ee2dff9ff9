# SPDX-License-Identifier: Apache-2.0
"""Line and bar charts as small SVG files: an element per curve, text as text."""

import html
import math

WIDTH, HEIGHT = 300, 220  # of a panel's axes
LEFT, RIGHT, TOP, BOTTOM = 60, 24, 28, 44
DASHES = {"marked": "", "dashed": ' stroke-dasharray="5 3"', "dotted": ' stroke-dasharray="1 3"'}
COLOURS = ("#1f6fb4", "#c4501b", "#3a9a5b", "#777777")


class Curve:
    """One line of a panel. style: "marked", "dashed" or "dotted"; colour: an index."""

    def __init__(self, label, points, colour, style="marked"):
        self.label, self.points, self.colour, self.style = label, sorted(points), COLOURS[colour], style


class Panel:
    def __init__(self, title, x_label, y_label, curves, x_ticks=None, y_from=None, y_log=True):
        self.title, self.x_label, self.y_label, self.curves = title, x_label, y_label, curves
        self.x_ticks, self.y_from, self.y_log = x_ticks, y_from, y_log

    def y_range(self):
        values = [y for curve in self.curves for _, y in curve.points]
        values += [] if self.y_from is None else [self.y_from]
        return min(values), max(values)


def number(value):
    return f"{value:g}" if value < 1e6 else f"{value / 2**20:g} Mi" if value % 2**20 == 0 else f"{value:g}"


def log_ticks(low, high):
    factors = (1, 2, 5) if high / low < 500 else (1,)
    return [factor * 10.0**power for power in range(-4, 9) for factor in factors if low <= factor * 10.0**power <= high]


def linear_ticks(low, high):
    step = 10.0 ** math.floor(math.log10(high - low))
    step = next(step * factor for factor in (0.1, 0.2, 0.5, 1) if (high - low) / (step * factor) <= 6)
    return [round(i * step, 9) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def panel_lines(panel, x0, y0, y_range):
    low, high = y_range
    if panel.y_log:
        low, high = low / 1.15, high * 1.15
    xs = [math.log(x) for curve in panel.curves for x, _ in curve.points]
    scale = math.log if panel.y_log else (lambda y: y)
    x_margin = 0.04 * (max(xs) - min(xs) or 1)

    def place_x(x):
        return x0 + WIDTH * (math.log(x) - min(xs) + x_margin) / (max(xs) - min(xs) + 2 * x_margin)

    def place_y(y):
        return y0 + HEIGHT * (scale(high) - scale(y)) / (scale(high) - scale(low))

    x_ticks = panel.x_ticks or log_ticks(math.exp(min(xs)), math.exp(max(xs)))
    y_ticks = log_ticks(low, high) if panel.y_log else linear_ticks(low, high)
    grid = "".join(f"M{place_x(x):.1f} {y0}v{HEIGHT}" for x in x_ticks)
    grid += "".join(f"M{x0} {place_y(y):.1f}h{WIDTH}" for y in y_ticks)
    yield f'<path d="{grid}" stroke="#e0e0e0" fill="none"/>'
    yield f'<path d="M{x0} {y0}v{HEIGHT}h{WIDTH}" stroke="#000" fill="none"/>'

    def text(x, y, words, more=""):
        return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{html.escape(words)}</text>'

    yield '<g text-anchor="middle">'
    yield text(x0 + WIDTH / 2, y0 - 10, panel.title)
    yield "".join(text(place_x(x), y0 + HEIGHT + 14, number(x)) for x in x_ticks)
    yield text(x0 + WIDTH / 2, y0 + HEIGHT + 32, panel.x_label)
    middle = f"{x0 - 42} {y0 + HEIGHT / 2}"
    yield text(x0 - 42, y0 + HEIGHT / 2, panel.y_label, f' transform="rotate(-90 {middle})"')
    yield "</g>"
    yield '<g text-anchor="end">' + "".join(text(x0 - 6, place_y(y) + 3, number(y)) for y in y_ticks) + "</g>"
    for curve in panel.curves:
        points = [(place_x(x), place_y(y)) for x, y in curve.points]
        yield (
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" stroke="{curve.colour}"'
            f' fill="none"{DASHES[curve.style]}/>'
        )
        if curve.style == "marked":
            dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
            yield f'<path d="{dots}" stroke="{curve.colour}" stroke-width="5" stroke-linecap="round"/>'


def legend_lines(curves, x, y):
    for curve in curves:
        yield (
            f'<path d="M{x} {y - 3}h22" stroke="{curve.colour}"{DASHES[curve.style]}/>'
            f'<text x="{x + 28}" y="{y}">{html.escape(curve.label)}</text>'
        )
        y += 14


class Chart:
    """Rows of panels, and below them one legend, that of the panel with most curves."""

    def __init__(self, title, rows, share_y=True):
        self.title, self.rows, self.share_y = title, rows, share_y

    def text(self):
        """The SVG file."""
        legend = max((panel for row in self.rows for panel in row), key=lambda panel: len(panel.curves)).curves
        width = max(map(len, self.rows)) * (LEFT + WIDTH + RIGHT)
        panels_height = len(self.rows) * (TOP + HEIGHT + BOTTOM)
        per_column = math.ceil(len(legend) / 2)
        height = panels_height + 14 * per_column + 8
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" font-family="sans-serif" font-size="10">',
            f"<title>{html.escape(self.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
        ]
        for i, row in enumerate(self.rows):
            ranges = [panel.y_range() for panel in row]
            shared = min(low for low, _ in ranges), max(high for _, high in ranges)
            for j, (panel, own) in enumerate(zip(row, ranges, strict=True)):
                lines += panel_lines(
                    panel,
                    LEFT + j * (LEFT + WIDTH + RIGHT),
                    TOP + i * (TOP + HEIGHT + BOTTOM),
                    shared if self.share_y else own,
                )
        for i in (0, 1):
            lines += legend_lines(legend[i * per_column : (i + 1) * per_column], LEFT + i * 200, panels_height + 12)
        return "\n".join([*lines, "</svg>"]) + "\n"


class Bars:
    """A bar for each row, of parts one behind the other. rows: a label and, by part, a length."""

    BAR, GAP, LABEL, LENGTH = 18, 8, 190, 420

    def __init__(self, title, x_label, rows):
        self.title, self.x_label, self.rows = title, x_label, rows

    def text(self):
        """The SVG file."""
        parts = list(self.rows[0][1])
        most = max(sum(lengths.values()) for _, lengths in self.rows)
        bottom = 26 + len(self.rows) * (self.BAR + self.GAP)
        width, height = self.LABEL + self.LENGTH + 50, bottom + 24
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" font-family="sans-serif" font-size="10">',
            f"<title>{html.escape(self.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
        ]
        for i, part in enumerate(parts):
            x = self.LABEL + 90 * i
            lines.append(f'<path d="M{x} 8h10v8h-10z" fill="{COLOURS[i]}"/><text x="{x + 14}" y="16">{part}</text>')
        for i, (label, lengths) in enumerate(self.rows):
            y, x = 26 + i * (self.BAR + self.GAP), float(self.LABEL)
            middle = y + self.BAR / 2 + 4
            lines.append(f'<text x="{self.LABEL - 8}" y="{middle:g}" text-anchor="end">{html.escape(label)}</text>')
            for part, colour in zip(parts, COLOURS, strict=True):
                length = self.LENGTH * lengths[part] / most
                lines.append(f'<path d="M{x:.1f} {y}h{length:.1f}v{self.BAR}h-{length:.1f}z" fill="{colour}"/>')
                x += length
            lines.append(f'<text x="{x + 6:.1f}" y="{middle:g}">{sum(lengths.values()):.0f}</text>')
        lines.append(f'<text x="{self.LABEL}" y="{bottom + 14}">{html.escape(self.x_label)}</text>')
        return "\n".join([*lines, "</svg>"]) + "\n"
