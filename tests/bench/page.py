"""The plots and tables of pages, from docs/benchmarks/*.json: the last thing that the benches do.

python tests/bench/page.py
"""

import json
from pathlib import Path
from statistics import median

import link_fit
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[2] / "docs"
COLOURS = ["#57606a", "#4c78a8", "#e08a3c", "#8f6bb8", "#2f9e63", "#c44e52", "#b8860b"]
PLAIN = {"svg.fonttype": "none", "svg.hashsalt": "shardbook", "font.family": "sans-serif", "font.size": 11}


def main() -> None:
    for name, (title, draw, tabulate) in SHOWN.items():
        page = DOCS / f"{title}.md"
        if not source_of(name).is_file():
            continue  # not yet measured
        data = json.loads(source_of(name).read_text())
        with plt.rc_context(PLAIN):
            figure, axes = plt.subplots(figsize=(8.4, 4.4), layout="constrained")
            draw(axes, data)
            axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(DOCS / (f"{title}-{name}.svg" if title != name else f"{name}.svg"), metadata={"Date": None})
            plt.close(figure)
        before, _, rest = page.read_text().partition(f"<!-- {name} -->")
        _, _, after = rest.partition("<!-- end -->")
        page.write_text(f"{before}<!-- {name} -->\n\n{tabulate(data)}\n\n<!-- end -->{after}")
        print(page)


def source_of(name: str) -> Path:
    """The data of what is shown."""
    return DOCS / "benchmarks" / f"{FROM.get(name, name)}.json"


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


def tabulate_link(data: dict) -> str:
    """Seconds by rate, bytes of a step, and zero3 divided by zeropp."""
    medians = data["medians"]
    variants = list(next(iter(medians.values())))
    rows = []
    for rate, found in medians.items():
        seconds = [found[variant]["seconds"] for variant in variants]
        ratio = found["zero3"]["seconds"] / found["zeropp"]["seconds"]
        rows.append([rate.replace("bit", "bit/s"), *(f"{value:.3g} s" for value in seconds), f"{ratio:.2f}x"])
    slowest = list(medians.values())[-1]
    for kind, said in (("wire_bytes", "sent, by the interface"), ("ledger_bytes", "sent, by the ledger")):
        sent = [slowest[variant][kind] for variant in variants]
        ratio = slowest["zeropp"][kind] / slowest["zero3"][kind]
        rows.append([said, *(f"{value / 1e6:.1f} MB" for value in sent), f"{ratio:.3f} of it"])
    return table(["link", *variants, "zeropp against zero3"], rows)


def tabulate_convergence(data: dict) -> str:
    first_name = next(iter(data["variants"]))
    base = data["variants"][first_name]["eval"][-1]
    rows = []
    for name, found in data["variants"].items():
        first, last = found["eval"][0], found["eval"][-1]
        off = "" if name == first_name else f"{round(100 * (last / base - 1), 2) + 0.0:+.2f}%"  # never -0.00
        rows.append([name, f"2 x {found['ranks_of_a_node']}", f"{first:.4f}", f"{last:.4f}", off])
    return table(
        ["variant", "nodes x ranks", "held out before", f"after {data['steps']} steps", f"against {first_name}"], rows
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def draw_host(axes, data: dict) -> None:
    """Each part beside what bounds it."""
    rows = [(name, ratio) for name, ratio, _ in ratios_of(data)]
    axes.barh([name for name, _ in rows], [ratio for _, ratio in rows], color=COLOURS[1])
    axes.axvline(1.0, color=COLOURS[0], linewidth=1)
    axes.bar_label(axes.containers[0], fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("of the yardstick's rate (median of rounds in turn)")


def ratios_of(data: dict) -> list[tuple[str, float, str]]:
    """What is measured, over its yardstick, and both in words."""
    adamw, disk, pipe = data["adamw"], data["disk"], data["pipeline"]
    whole, pieces = median(adamw["whole"]), median(adamw["pieces"])
    rows = [("AdamW in pieces / whole", pieces / whole, f"{pieces:,.0f} of {whole:,.0f} M parameters/s, one thread")]
    for what in ("read", "write"):
        if what in disk["fio"]:
            ratio = median([a / b for a, b in zip(disk["ours"][what], disk["fio"][what], strict=True)])
            said = f"{median(disk['ours'][what]):.2f} of {median(disk['fio'][what]):.2f} GB/s"
            rows.append((f"{what} / best fio", ratio, said))
    bound = [max(pair) for pair in zip(pipe["transfers"], pipe["adamw"], strict=True)]
    ratio = median([limit / taken for limit, taken in zip(bound, pipe["ring"], strict=True)])
    said = f"{median(bound):.2f} s of transfers or AdamW, {median(pipe['ring']):.2f} s in the ring"
    rows.append(("ring: its slower half / itself", ratio, said))
    hidden = median(data["hidden"]["hidden"])
    rows.append(("host's step hidden behind a forward", hidden, "12 blocks, sleeps for compute"))
    return rows


def tabulate_host(data: dict) -> str:
    lines = [f"{data['cores']} cores, torch {data['torch']}, commit {data['commit']}, load {data['load']:.1f}.", ""]
    lines += ["![ratios](offload-host.svg)", "", "| part | of its yardstick | |", "| --- | --- | --- |"]
    lines += [f"| {name} | {ratio:.2f} | {said} |" for name, ratio, said in ratios_of(data)]
    return "\n".join(lines)


def draw_forecast(axes, data: dict) -> None:
    """Predicted against measured, a point a variant and rate."""
    predicted, medians = link_fit.predict(data["medians"]), data["medians"]
    for number, (rate, found) in enumerate(medians.items()):
        measured = [row["seconds"] for row in found.values()]
        axes.plot(measured, [predicted[rate][name] for name in found], "o", color=COLOURS[number], label=rate)
    ends = [0.8, 50]
    axes.plot(ends, ends, color=COLOURS[0], linewidth=1)
    for share in (0.85, 1.15):
        axes.plot(ends, [share * end for end in ends], color=COLOURS[0], linewidth=0.6, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, seconds a step (dashed: 15% off)")
    axes.set_ylabel("predicted")
    axes.legend(frameon=False)


def tabulate_forecast(data: dict) -> str:
    predicted, medians = link_fit.predict(data["medians"]), data["medians"]
    variants = list(next(iter(medians.values())))
    rows = []
    for rate, found in medians.items():
        pairs = [(predicted[rate][name], found[name]["seconds"]) for name in variants]
        rows.append([rate.replace("bit", "bit/s"), *(f"{said:.2f} s, {said / was - 1:+.0%}" for said, was in pairs)])
    return table(["link", *variants], rows)


SHOWN = {  # by name of the data: the page, and what it shows
    "link": ("zeropp", draw_link, tabulate_link),
    "convergence": ("zeropp", draw_convergence, tabulate_convergence),
    "host": ("offload", draw_host, tabulate_host),
    "optimizers": ("optimizers", draw_convergence, tabulate_convergence),
    "forecast": ("planning", draw_forecast, tabulate_forecast),
}
FROM = {"forecast": "link"}

if __name__ == "__main__":
    main()
