"""Charts as plain SVG text: axes, lines, rectangles; colours come from CSS so that a page can be dark or light."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

PALETTE = ("#2f7ed8", "#e07b00", "#2a9d6f", "#c23b5a", "#7b52ab", "#8a6d3b")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:var(--ink,#222)}.axis{stroke:var(--ink,#222);stroke-width:1}"
    ".grid{stroke:var(--faint,#ddd);stroke-width:1}.line{fill:none;stroke-width:2}"
)


Ticks = Iterable[tuple[float, str]]
"""Values and what stands beside them."""


@dataclass(kw_only=True)
class Chart:
    """An x-y chart under construction. With `log_x` the x axis is logarithmic."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    left: int = 60
    right: int = 20
    top: int = 30
    bottom: int = 42
    body: list[str] = field(default_factory=list)

    def at_x(self, value: float) -> float:
        """The pixel of an x value."""
        low, high = self.x
        share = math.log(value / low) / math.log(high / low) if self.log_x else (value - low) / ((high - low) or 1)
        return round(self.left + share * (self.width - self.left - self.right), 2)

    def at_y(self, value: float) -> float:
        """The pixel of a y value."""
        low, high = self.y
        return round(self.height - self.bottom - (value - low) / ((high - low) or 1) * (self.height - self.top - self.bottom), 2)

    def axes(self, x_ticks: Ticks, y_ticks: Ticks, x_title: str = "", y_title: str = "") -> None:
        """Draw the frame, the grid and the words on it."""
        x0, x1, y0, y1 = self.left, self.width - self.right, self.height - self.bottom, self.top
        for value, text in y_ticks:
            y = self.at_y(value)
            self.body.append(f'<line class="grid" x1="{x0}" x2="{x1}" y1="{y}" y2="{y}"/>')
            self.text(x0 - 6, y + 4, text, anchor="end")
        for value, text in x_ticks:
            x = self.at_x(value)
            self.body.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{y0}" y2="{y1}"/>')
            self.text(x, y0 + 16, text, anchor="middle")
        self.body.append(f'<path class="axis" fill="none" d="M{x0},{y1}V{y0}H{x1}"/>')
        self.text((x0 + x1) / 2, self.height - 8, x_title, anchor="middle")
        self.text(x0, y1 - 12, y_title)

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        """Join points."""
        path = " ".join(f"{self.at_x(x)},{self.at_y(y)}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.body.append(f'<polyline class="line" stroke="{colour}"{dash} points="{path}"/>')

    def dot(self, x: float, y: float, colour: str, title: str = "") -> None:
        """One point, with words for the mouse."""
        self.body.append(f'<circle cx="{self.at_x(x)}" cy="{self.at_y(y)}" r="4" fill="{colour}"><title>{escape(title)}</title></circle>')

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", colour: str = "") -> None:
        """Words at a pixel."""
        if text:
            fill = f' style="fill:{colour}"' if colour else ""
            self.body.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{fill}>{escape(text)}</text>')

    def svg(self, *, alone: bool = True, label: str = "") -> str:
        """The whole as one SVG element; `alone` as a file of its own, with its style and a background."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(label)}"'
        if not alone:
            return f"{head}>{''.join(self.body)}</svg>"
        paper = '<rect width="100%" height="100%" fill="#fff"/>'
        return "\n".join([f'{head} width="{self.width}" height="{self.height}"><style>{STYLE}</style>{paper}', *self.body, "</svg>\n"])


def nice_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round values between `low` and `high`, about so many."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / about
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
