"""The plots of docs/zeropp.md, drawn from docs/benchmarks/*.json: the last thing that the benches do.

python tests/bench/plots.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[2] / "docs"
COLOURS = ["#57606a", "#4c78a8", "#e08a3c", "#8f6bb8", "#2f9e63", "#c44e52", "#b8860b"]
PLAIN = {"svg.fonttype": "none", "svg.hashsalt": "shardbook", "font.family": "sans-serif", "font.size": 11}


def main() -> None:
    drawings = {"link": draw_link, "convergence": draw_convergence}
    for name, draw in drawings.items():
        source = DOCS / "benchmarks" / f"{name}.json"
        if not source.is_file():
            continue
        with plt.rc_context(PLAIN):
            figure, axes = plt.subplots(figsize=(8.4, 4.4), layout="constrained")
            draw(axes, json.loads(source.read_text()))
            axes.spines[["top", "right"]].set_visible(False)
            target = DOCS / f"zeropp-{name}.svg"
            figure.savefig(target, metadata={"Date": None})
            plt.close(figure)
        print(target)


def draw_link(axes, data: dict) -> None:
    """Seconds a step by rate of the link, a bar a variant."""
    medians = data["medians"]
    variants = list(next(iter(medians.values())))
    width = 0.8 / len(variants)
    for number, variant in enumerate(variants):
        seconds = [found[variant]["seconds"] for found in medians.values()]
        places = [place + (number - (len(variants) - 1) / 2) * width for place in range(len(medians))]
        bars = axes.bar(places, seconds, width, label=variant, color=COLOURS[number])
        axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(medians)), [rate.replace("bit", "bit/s") for rate in medians])
    axes.set_xlabel("link between the two nodes")
    axes.set_ylabel("seconds a step (log scale)")
    axes.legend(frameon=False, loc="upper left")


def draw_convergence(axes, data: dict) -> None:
    """Running mean of the training loss, a line a variant; held-out loss at the end beside its name."""
    window = 20
    for number, (name, found) in enumerate(data["variants"].items()):
        loss = found["loss"]
        means = [sum(loss[end - window : end]) / window for end in range(window, len(loss) + 1)]
        label = f"{name}: held out {found['eval'][-1]:.4f}"
        axes.plot(range(window, len(loss) + 1), means, color=COLOURS[number], linewidth=1.3, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, mean of {window} steps")
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
