"""A page: one self-contained file of panels, each a figure by plotly with the same numbers as a table below it.

Invariant: a panel's figure and table are made of the same rows. A new panel is one more `Panel` in the list that a page
gives to `render`; its `kind` chooses the figure: none (table, counts, tokens), lines, bars, spans or lanes.
"""

import json
import re
import tomllib
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from shardbook.paths import write_whole

Figure = dict[str, Any]  # plotly's data and layout
# Okabe and Ito's palette (Color Universal Design, 2008): color-blind readers can distinguish it, on white and black
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
HELD_OUT = ", held out"  # of a column that has the color of the line before it
LINE, BAR, GAP = 18, 18, 4  # pixels of a bar's label, of a bar, and between bars; three times that between groups
FOLDER = Path(__file__).parent
# its part for lines and bars, by `npm pack plotly.js-basic-dist-min`: a fourth of what the Python package carries
LIBRARY = FOLDER / "plotly-basic.min.js"
HOVER = "<extra></extra>%{hovertext}<br>%{fullData.name}: %{x:,.3~f} "
SPAN_HOVER = (
    "<extra></extra>%{fullData.name}: %{hovertext}<br>%{customdata[0]:,.1f} to %{customdata[1]:,.1f} ms, "
    "busy %{customdata[2]:,.1f} ms"
)
LANE = 66  # pixels of a lane, with its name
PANELS = tomllib.loads((FOLDER / "pages.toml").read_text())


@dataclass(frozen=True)
class Panel:
    """One section of a page.

    `rows`: a label (of lines: the place on the x axis; a tuple of two: the second varies faster) and its values by
    column. `kind`: `table`; `counts`, with a bar in each row; `tokens`, texts in pieces, some marked; `lines`, one a
    column; `bars`, one a row with columns stacked; `spans`, a row's five values from least to most; `lanes`, a bar
    for each row, whose label is its lane, what is done and of what, from its first value to its second, the more
    opaque the nearer its third is to their difference.
    """

    title: str
    words: str
    rows: list[tuple[Any, dict[str, Any]]]
    kind: str = "table"
    heads: tuple[str, ...] = ("variant",)  # above labels
    caption: str = ""  # of the table, where it is not the title
    unit: str = ""  # of the figure's axis of values
    scale: float = 1.0  # of the table's numbers, what the figure's unit is
    form: str = ""  # of numbers in the table; empty: every digit
    log: str = ""  # axes with a logarithmic scale
    first: int = 0  # the color of the first column
    thin: tuple[str, ...] = ()  # lines of less weight
    from_zero: bool = False  # whether lines are drawn on an axis that begins at 0
    together: int = 1  # rows of bars, with less between them than between these groups
    limit: float = 0.0  # a dashed line across bars
    remarks: dict[tuple[Any, str], str] = field(default_factory=dict)  # behind a number, by label and column

    @property
    def id(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for _, cells in self.rows for name in cells))

    @property
    def headings(self) -> list[str]:
        return [*self.columns, *["total"] * (self.kind == "bars" and len(self.columns) > 1)]

    def texts(self, label: Any, cells: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns a row of the table: its columns and texts, and of bars their sum."""
        if self.kind == "bars":
            cells = dict.fromkeys(self.columns, 0) | cells | {"total": sum(cells.values())}
        return [(name, self._text(cells.get(name)) + self.remarks.get((label, name), "")) for name in self.headings]

    def _text(self, value: Any) -> str:
        return value if isinstance(value, str) else "" if value is None else format(value, self.form)

    def share(self, cells: dict[str, Any]) -> float:
        """Returns the length of the bar of a row of counts, in percent of the longest."""
        (most,) = {max(cells[name] for _, cells in self.rows) for name in self.columns}
        return round(100 * cells[self.columns[0]] / most, 1)


def panel_of(name: str, rows: list[tuple[Any, dict[str, Any]]], kind: str, /, **more: Any) -> Panel:
    """Returns a panel of pages.toml; `more`: its other fields, and what its texts name in braces."""
    page, _, key = name.partition(".")
    fields = {field: more.pop(field) for field in list(more) if field in Panel.__dataclass_fields__}
    texts = {field: text if field == "form" else text.format(**more) for field, text in PANELS[page][key].items()}
    return Panel(rows=rows, kind=kind, **texts | fields)


def render(path: Path, title: str, about: list[str], panels: list[Panel]) -> None:
    """Writes a page: `about` in paragraphs, then each panel as a section whose id is made of its title."""
    draw = {"lines": draw_lines, "bars": draw_bars, "spans": draw_spans, "lanes": draw_lanes}
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = lambda name: Markup(re.sub(r"[,._=]", r"\g<0><wbr>", escape(str(name))))
    environment.filters["in_script"] = lambda value: Markup(json.dumps(value).replace("</", "<\\/"))
    page = environment.get_template("page.html").render(
        title=title,
        about=about,
        panels=panels,
        figures={panel.id: draw[panel.kind](panel) for panel in panels if panel.kind in draw},
        library=Markup(LIBRARY.read_text()),
    )
    write_whole(path, page)


def draw_lines(panel: Panel) -> Figure:
    """Returns a line for each column, and diamonds for held-out values."""
    names = [name for name in panel.columns if not name.endswith(HELD_OUT)]
    traces: list[dict[str, Any]] = []
    for name in panel.columns:
        number = names.index(name.removesuffix(HELD_OUT))
        points = {x: cells[name] for x, cells in panel.rows if cells.get(name) is not None}
        if "y" in panel.log:
            points = {x: value for x, value in points.items() if value}  # a logarithm shows no zero
        if not points:
            continue
        # equal curves lie on each other: the first is widest, so that each still shows
        width = 1 if name in panel.thin else 2 + 1.2 * (len(names) - 1 - number) * (not panel.log)
        look = {"color": colour(number + panel.first)}
        trace = {"type": "scatter", "name": broken(name), "x": list(points), "y": list(points.values())}
        if name.endswith(HELD_OUT):
            marker = look | {"size": 6 + width, "symbol": "diamond"}
            traces.append(trace | {"mode": "markers", "marker": marker, "showlegend": len(names) == 1})
        else:
            mode = "lines+markers" if panel.log or len(points) == 1 else "lines"
            traces.append(trace | {"mode": mode, "line": look | {"width": width}})
    steps = [label for label, _ in panel.rows]
    x: dict[str, Any] = {"title": {"text": panel.heads[0]}, "tickformat": ",d"}
    if max(steps) - min(steps) <= 10:
        x["dtick"] = 1  # a step is whole
    y: dict[str, Any] = {"title": {"text": panel.unit}}
    if "x" in panel.log:
        x |= {"type": "log", "tickvals": steps}
    if panel.from_zero:
        y["rangemode"] = "tozero"
    if "y" in panel.log:
        values = [value for trace in traces for value in trace["y"]]
        few = max(values, default=1) < 100 * min(values, default=1)  # powers of ten: too few to read the axis by
        y |= {"type": "log", "tickformat": ".0e", "dtick": "D2" if few else 1}
    layout = {"yaxis": y | {"automargin": True}, "meta": {"height": 320}, "hovermode": "x unified"}
    return _figure(traces, x, showlegend=len(traces) > 1, **layout)


def draw_bars(panel: Panel) -> Figure:
    """Returns a horizontal bar for each row, with its columns stacked."""
    places, layout = _places(panel)
    traces = [
        {"type": "bar", "orientation": "h", "name": broken(name), "y": places, "width": BAR}
        | {"x": [cells.get(name, 0) / panel.scale for _, cells in panel.rows], "marker": {"color": colour(number)}}
        | {"hovertext": [_label(label) for label, _ in panel.rows], "hovertemplate": HOVER + panel.unit}
        for number, name in enumerate(panel.columns)
    ]
    longest = 1.03 * max(panel.limit, *(sum(cells.values()) / panel.scale for _, cells in panel.rows))
    # a bar of many times the limit would make those that fit too short to read
    x = {"title": {"text": panel.unit}, "range": [0, min(longest, 3 * panel.limit or longest)]}
    line = {"type": "line", "x0": panel.limit, "x1": panel.limit, "yref": "paper", "y0": 0, "y1": 1}
    shapes = [line | {"line": {"width": 2, "dash": "dash"}}] * bool(panel.limit)
    return _figure(traces, x, barmode="stack", showlegend=len(traces) > 1, shapes=shapes, **layout)


def draw_spans(panel: Panel) -> Figure:
    """Returns, for each row, a line from the least to the most of its five values, a bar over the middle half, and a
    mark at the median."""
    places, layout = _places(panel)
    rows = [[value / panel.scale for value in cells.values()] for _, cells in panel.rows]
    labels = [_label(label) for label, _ in panel.rows]
    traces: list[dict[str, Any]] = []
    for width, low, high in ((2, 0, 4), (BAR - 4, 1, 3)):
        ends = [end for row in rows for end in (row[low], row[high], None)]
        trace = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "line": {"width": width, "color": colour(4)}}
        traces.append(trace | {"x": ends, "y": [place for each in places for place in (each, each, None)]})
    marker = {"color": colour(5), "size": BAR - 4, "symbol": "line-ns", "line": {"width": 3, "color": colour(5)}}
    middle = {"type": "scatter", "mode": "markers", "x": [row[2] for row in rows], "y": places, "marker": marker}
    traces.append(middle | {"name": "median", "hovertext": labels, "hovertemplate": HOVER + panel.unit})
    least, most = min(row[0] for row in rows), max(row[4] for row in rows)
    beside = 0.03 * (most - least) or 0.03 * most
    x = {"title": {"text": panel.unit}, "range": [least - beside, most + beside]}
    return _figure(traces, x, showlegend=False, **layout)


def draw_lanes(panel: Panel) -> Figure:
    """Returns a bar for each row on its lane, in the colour of what is done; lanes are one below the other."""
    names = list(dict.fromkeys(lane for (lane, _, _), _ in panel.rows))
    note = {"x": 0, "xref": "paper", "xanchor": "left", "xshift": -2, "showarrow": False}
    notes = [note | {"text": name, "y": number * LANE + LINE / 2} for number, name in enumerate(names)]
    traces, last = [], max(cells["to"] for _, cells in panel.rows)
    for number, what in enumerate(dict.fromkeys(what for (_, what, _), _ in panel.rows)):
        rows = [(lane, of, *cells.values()) for (lane, kind, of), cells in panel.rows if kind == what]
        lengths = [end - begin for _, _, begin, end, _ in rows]
        share = [min(1.0, busy / length) for (*_, busy), length in zip(rows, lengths, strict=True)]
        look = {"color": colour(number), "opacity": [0.25 + 0.75 * each for each in share]}
        traces.append(
            {"type": "bar", "orientation": "h", "name": what, "width": LANE - LINE - 2 * GAP}
            | {"y": [names.index(row[0]) * LANE + (LANE + LINE) / 2 for row in rows], "base": [row[2] for row in rows]}
            | {"x": lengths, "hovertext": [_label(row[1]) for row in rows], "customdata": [row[2:] for row in rows]}
            | {"marker": look | {"line": {"width": 1, "color": "rgba(128,128,128,0.6)"}}, "hovertemplate": SPAN_HOVER}
        )
    axis = {"range": [len(names) * LANE, 0], "showticklabels": False, "showgrid": False, "zeroline": False}
    layout = {"yaxis": axis | {"fixedrange": True}, "annotations": notes, "meta": {"height": len(names) * LANE}}
    x = {"title": {"text": panel.unit}, "range": [0, 1.01 * last]}
    return _figure(traces, x, barmode="overlay", showlegend=True, **layout)


def _places(panel: Panel) -> tuple[list[float], dict[str, Any]]:
    """Returns the places of bars in pixels, and the layout beside them: each bar is under its label, so that long names
    on a phone take nothing from its length."""
    places, notes, at = [], [], 0.0
    for number, (label, _) in enumerate(panel.rows):
        text = _label(label)
        at += 3 * GAP * (number % panel.together == 0)
        height = LINE * (text.count("<br>") + 1)
        note = {"text": text, "x": 0, "xref": "paper", "xanchor": "left", "xshift": -2, "align": "left"}
        notes.append(note | {"y": at + height / 2, "showarrow": False})
        places.append(at + height + BAR / 2)
        at += height + BAR + GAP
    axis = {"range": [max(at, 70), 0], "showticklabels": False, "showgrid": False, "zeroline": False}
    return places, {"yaxis": axis, "annotations": notes, "meta": {"height": max(at, 70)}}


def _label(label: Any) -> str:
    return broken(", ".join(label) if isinstance(label, tuple) else str(label))


def _figure(data: list[dict[str, Any]], x: dict[str, Any], **layout: Any) -> Figure:
    """Returns a chart without colors of its own for text and lines: the page sets those, for light, dark and print."""
    plain = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "minreducedheight": 1,  # else a chart of few bars has no labels below its axis
        "height": layout["meta"]["height"] + 100,  # the page gives the legend what it takes, and the chart the rest
        # below, it would meet the axis' title
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": x | {"automargin": True},
    }
    return {"data": data, "layout": plain | layout}


def broken(name: str, width: int = 46) -> str:
    """Returns `name` for a figure, in lines of `width` characters, which a phone has room for, broken behind commas
    where it has some."""
    lines = wrap(re.sub(r",(?! )", ",\0 ", name), width)
    return "<br>".join(escape(line, quote=False) for line in lines).replace("\0 ", "").replace("\0", "")


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]
