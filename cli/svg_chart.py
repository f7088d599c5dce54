"""Grouped bars and lines as SVG, made by hand: no library, readable in light and dark, titles on every mark. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 900, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 70, 50
# Of Okabe and Ito: told apart by colour-blind eyes.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
MAX_LABELS = 12
STYLE = """text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:16px;font-weight:600}
.grid{stroke:#8884}@media(prefers-color-scheme:dark){text{fill:#ddd}.ground{fill:#16181c}}"""


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One name and a value (>= 0) for each label."""

    name: str
    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BarPanel:
    """A title and grouped bars; what is shown is values / `unit`."""

    title: str
    series: Sequence[Series]
    unit: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class LineSeries:
    """One name and a value (>= 0) for each label; None leaves a gap. Lines of one thing share a colour."""

    name: str
    values: tuple[float | None, ...]
    colour: int
    dashed: bool = False

    @property
    def stroke(self) -> str:
        """How its line is drawn."""
        dashes = ' stroke-dasharray="4 3"' if self.dashed else ""
        return f'fill="none" stroke="{COLOURS[self.colour % len(COLOURS)]}" stroke-width="1.5"{dashes}'


def line_charts(labels: Sequence[str], panels: Sequence[tuple[str, Sequence[LineSeries]]]) -> str:
    """Panels of a title and lines, one above the other over the same labels, as one SVG document."""
    drawn = []
    for title, series in panels:
        top = nice_ceiling(math.ceil(max((v for each in series for v in each.values if v is not None), default=0)))
        drawn.append((title, [*_legend(series), *_grid(top), *_lines(labels, series, top), *_ticks(labels)]))
    return _document(drawn)


def bar_chart(title: str, labels: Sequence[str], series: Sequence[Series]) -> str:
    """One panel of `bar_charts`."""
    return bar_charts(labels, [BarPanel(title, series)])


def bar_charts(labels: Sequence[str], panels: Sequence[BarPanel], *, short_label: Callable[[str], str] = str) -> str:
    """Panels one above the other over the same labels, as one SVG document.

    Every series has as many values as there are labels; `short_label` makes what stands under the bars of a label.
    """
    drawn, ticks = [], _ticks([short_label(label) for label in labels])
    for panel in panels:
        top = nice_ceiling(max((value for each in panel.series for value in each.values), default=0))
        bars = _bars(labels, panel, top)
        drawn.append((panel.title, [*_legend(panel.series), *_grid(top, panel.unit), *bars, *ticks]))
    return _document(drawn)


def _document(panels: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Titles and what is drawn under them, one above the other."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}" role="img">',
        f"<style>{STYLE}</style>",
    ]
    for place, (title, drawn) in enumerate(panels):
        parts += [
            f'<g transform="translate(0 {HEIGHT * place})"><title>{escape(title)}</title>',
            f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
            *drawn,
            "</g>",
        ]
    return "\n".join([*parts, "</svg>\n"])


def nice_ceiling(value: int) -> int:
    """The smallest 4, 8 or 20 times a power of ten that is not below `value`: its quarters are round."""
    power = 4
    while True:
        for step in (1, 2, 5):
            if step * power >= value:
                return step * power
        power *= 10


def _legend(series: Sequence[Series | LineSeries]) -> list[str]:
    parts, x = [], LEFT
    for index, each in enumerate(series):
        if isinstance(each, LineSeries):
            parts.append(f'<line x1="{x}" x2="{x + 22}" y1="48" y2="48" {each.stroke}/>')
        else:
            colour = COLOURS[index % len(COLOURS)]
            parts.append(f'<rect x="{x + 11}" y="42" width="11" height="11" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 27}" y="52">{escape(each.name)}</text>')
        x += 47 + 7 * len(each.name)
    return parts


def _grid(top: int, unit: int = 1) -> list[str]:
    parts = []
    for quarter in range(5):
        y = _y(top * quarter // 4, top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{short(top * quarter // 4, unit)}</text>')
    return parts


def _bars(labels: Sequence[str], panel: BarPanel, top: int) -> list[str]:
    parts, series = [], panel.series
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    bar = slot * 0.8 / max(1, len(series))
    for place, label in enumerate(labels):
        start = LEFT + slot * (place + 0.1)
        for index, each in enumerate(series):
            value = each.values[place]
            y = _y(value, top)
            parts.append(
                f'<rect x="{start + bar * index:.1f}" y="{y}" width="{max(1.0, bar - 1):.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{COLOURS[index % len(COLOURS)]}">'
                f"<title>{escape(each.name)}, {escape(label)}: {_exact(value, panel.unit)}</title></rect>"
            )
    return parts


def _lines(labels: Sequence[str], series: Sequence[LineSeries], top: int) -> list[str]:
    parts = []
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    for each in series:
        colour = COLOURS[each.colour % len(COLOURS)]
        path, pen = [], "M"
        for place, value in enumerate(each.values):
            if value is None:
                pen = "M"
                continue
            x, y = round(LEFT + slot * (place + 0.5), 1), _y(value, top)
            path.append(f"{pen}{x} {y}")
            pen = "L"
            told = f"{escape(each.name)}, {escape(labels[place])}: {value:,.1f}"
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"><title>{told}</title></circle>')
        parts.append(f'<path d="{" ".join(path)}" {each.stroke}/>')
    return parts


def _ticks(labels: Sequence[str]) -> list[str]:
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    every = -(-len(labels) // MAX_LABELS)
    return [
        f'<text x="{LEFT + slot * (place + 0.5):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
        f"{escape(labels[place])}</text>"
        for place in range(0, len(labels), max(1, every))
    ]


def _y(value: float, top: int) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)


def short(value: int, unit: int = 1) -> str:
    """1500 → 1.5k, 2000000 → 2M; 1500 in units of 1000 → 1.5."""
    for size, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size * unit:
            return f"{value / size / unit:g}{name}"
    return f"{value / unit:g}"


def _exact(value: int, unit: int) -> str:
    return f"{value:,}" if unit == 1 else f"{value / unit:,}"
