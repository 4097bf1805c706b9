"""Draws docs/preferences.svg: margins and accuracies of a run of a preference, training and held-out pairs.

make train RECIPE=smollm2-135m-dpo ARGS="run.name=dpo"
python tests/bench/preference_plot.py runs/dpo/metrics.jsonl docs/preferences.svg
"""

import json
import sys
from pathlib import Path

WIDE, HIGH, LEFT, TOP = 340, 200, 48, 34
PANELS = (("rewards/margins", "margin of rewards"), ("rewards/accuracies", "share of pairs ranked right"))
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}line{stroke:#d0d7de}.grid{stroke-width:1}"
    ".train{stroke:#8c959f;fill:none;stroke-width:1.2}.eval{stroke:#0969da;fill:none;stroke-width:2.2}"
    ".dot{fill:#0969da}@media (prefers-color-scheme:dark){text{fill:#e6edf3}line{stroke:#3d444d}"
    ".train{stroke:#8b949e}.eval{stroke:#58a6ff}.dot{fill:#58a6ff}}"
)


def panel(rows: list[dict], metric: str, title: str, at: int) -> str:
    """One chart, its left edge at `at`."""
    lines = {
        what: [(row["step"], row[f"{what}/{metric}"]) for row in rows if f"{what}/{metric}" in row]
        for what in ("train", "eval")
    }
    values = [value for points in lines.values() for _, value in points]
    low, high = min(0.0, *values), max(values)
    last = max(step for points in lines.values() for step, _ in points)
    high = 1.0 if "accuracies" in metric else high

    def place(step: float, value: float) -> tuple[float, float]:
        x = at + LEFT + step / last * (WIDE - LEFT - 12)
        return x, TOP + HIGH - (value - low) / (high - low) * HIGH

    drawn = [f'<text x="{at + LEFT}" y="18" font-weight="600">{title}</text>']
    for part in range(5):
        value = low + (high - low) * part / 4
        _, y = place(0, value)
        drawn.append(f'<line class="grid" x1="{at + LEFT}" x2="{at + WIDE - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{at + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for what, points in lines.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        drawn.append(f'<polyline class="{what}" points="{path}"/>')
        if what == "eval":
            dots = (place(*point) for point in points)
            drawn += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dots]
    for step in (0, last):
        x, _ = place(step, low)
        drawn.append(f'<text x="{x:.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">{step}</text>')
    return "".join(drawn)


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    charts = "".join(panel(rows, *names, at=number * (WIDE + 20)) for number, names in enumerate(PANELS))
    below = TOP + HIGH + 40
    legend = (
        f'<line class="eval" x1="{LEFT}" x2="{LEFT + 24}" y1="{below}" y2="{below}"/>'
        f'<text x="{LEFT + 30}" y="{below + 4}">held-out pairs</text>'
        f'<line class="train" x1="{LEFT + 150}" x2="{LEFT + 174}" y1="{below}" y2="{below}"/>'
        f'<text x="{LEFT + 180}" y="{below + 4}">pairs of the step; across: steps</text>'
    )
    wide, high = 2 * WIDE + 20, below + 16
    said = "Margin of rewards and share of pairs ranked right, by step"
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" aria-label="{said}">'
        f"<style>{STYLE}</style>{charts}{legend}</svg>\n"
    )


if __name__ == "__main__":
    main()
