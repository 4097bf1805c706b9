"""What bench-peers makes of its measurements: who computed the same, ratios with their spread, table and plot.

Pure functions of docs/benchmarks/peers.json; `show` writes peers.md's table and peers.svg.

    python tests/bench/peer_report.py                        # again, from the data
"""

import json
import statistics
from itertools import compress
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
# Relative. Contenders add in unlike orders, which AdamW enlarges step by step; the page says what was seen, and what
# mistakes give.
TOLERANCE = 1e-5
PAIRS = [  # ours, theirs
    ("ddp", "bare DDP"),
    ("ddp", "HF Trainer"),
    ("zero1", "bare fully_shard, gathered"),  # with one micro-batch a step zero1 and zero2 send the same
    ("zero1", "DeepSpeed ZeRO-1"),
    ("zero2", "bare fully_shard, gathered"),
    ("zero2", "DeepSpeed ZeRO-2"),
    ("zero3", "bare fully_shard"),
    ("zero3", "transformers, sharded on load"),
    ("zero3", "DeepSpeed ZeRO-3"),
    ("hsdp", "bare fully_shard, hybrid"),
    ("packed", "padded"),
]
OURS = {ours for ours, _ in PAIRS} | {"padded"}
ON_FOUR_RANKS = {"hsdp", "bare fully_shard, hybrid"}  # a mesh of two axes; as many rows in a step, a smaller model
OTHER_ROWS = {"packed", "padded"}  # their losses are compared with nothing, and no two steps have the same tokens


Group = dict[str, dict]  # what stepped in turn: a row a contender


def judge(groups: list[Group], tolerance: float = TOLERANCE) -> list[Group]:
    """`groups`, each row with its largest relative difference of a loss from the median of those of the same model that
    are not ours, step by step; beyond `tolerance` it is `wrong`, with the step. Without any of the others: from the
    median of ours.
    """
    measured = [(name, row) for group in groups for name, row in group.items() if is_compared(name, row)]

    def judge_row(name: str, row: dict) -> dict:
        is_alike = [(each in ON_FOUR_RANKS) == (name in ON_FOUR_RANKS) for each, _ in measured]
        same = [(each, other["losses"]) for each, other in compress(measured, is_alike)]
        referees = [(each, losses) for each, losses in same if each not in OURS] or same
        if {each for each, _ in referees} == {name}:
            return row  # it would be compared with itself
        expected = [statistics.median(losses) for losses in zip(*(losses for _, losses in referees), strict=True)]
        off = [abs(loss / other - 1) for loss, other in zip(row["losses"], expected, strict=True)]
        # written so that a loss that is not a number is wrong
        first = next((step for step, each in enumerate(off, 1) if not each <= tolerance), None)
        if not first:
            return row | {"largest_difference": max(off)}
        loss, other = row["losses"][first - 1], expected[first - 1]
        return row | {"wrong": f"loss of step {first} is {loss:.6f}, the others' {other:.6f}"}

    return [
        {name: judge_row(name, row) if is_compared(name, row) else row for name, row in group.items()}
        for group in groups
    ]


def label(name: str) -> str:
    return name + " (four ranks, half of the model)" * (name in ON_FOUR_RANKS)


def shortened(commit: str) -> str:
    """A commit's first twelve digits, and that the tree was not clean where it was not."""
    return commit[:12] + "-dirty" * commit.endswith("-dirty")


def is_compared(name: str, row: dict) -> bool:
    return "losses" in row and name not in OTHER_ROWS


def rates(row: dict, warmup: int) -> list[float]:
    """Useful tokens a second of all ranks, in each step after the first `warmup`."""
    pairs = list(zip(row["useful_tokens"], row["seconds"], strict=True))[warmup:]
    return [tokens / seconds for tokens, seconds in pairs]


def overall(row: dict, warmup: int) -> list[float]:
    """The same over all those steps together, as one figure."""
    return [sum(row["useful_tokens"][warmup:]) / sum(row["seconds"][warmup:])]


def compare(groups: list[Group], warmup: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Of each pair that was measured in one group: the median over rounds, of all launches, of our tokens/s divided by
    theirs in the same round, and the lower and upper quartile. Of `OTHER_ROWS` over launches, each as a whole."""
    medians, quartiles = {}, {}
    for ours, theirs in PAIRS:
        found = []
        for rows in [[group.get(name, {}) for name in (ours, theirs)] for group in groups]:
            if all("losses" in row and "wrong" not in row for row in rows):
                speed = overall if ours in OTHER_ROWS else rates
                found += [our / their for our, their in zip(*(speed(row, warmup) for row in rows), strict=True)]
        if found:
            low, middle, high = statistics.quantiles(found, n=4, method="inclusive") if found[1:] else found * 3
            medians[f"{ours} / {theirs}"], quartiles[f"{ours} / {theirs}"] = middle, [low, high]
    return medians, quartiles


def tabulate(data: dict) -> str:
    """A line a ratio. Then a line a contender, over its launches: seconds a step, tokens/s, peak memory, how far its
    losses are off; or why it has none."""
    from page import table

    lines, warmup = [], data["settings"]["warmup"]
    for name in dict.fromkeys(name for group in data["groups"] for name in group):
        rows = [group[name] for group in data["groups"] if name in group]
        kinds = [(row, kind) for kind in ("wrong", "left_out") for row in rows if kind in row]
        if kinds:  # in one launch is enough to be said
            row, kind = kinds[0]
            lines.append([name, f"{kind.replace('_', ' ')}: {row[kind]}", "", "", ""])
            continue
        seconds = statistics.median(each for row in rows for each in row["seconds"][warmup:])
        speed = statistics.median(each for row in rows for each in rates(row, warmup))
        memory = max(row["peak_resident_bytes"] for row in rows) / 1e9
        off = [row["largest_difference"] for row in rows if "largest_difference" in row]
        lines.append([label(name), f"{seconds:.2f}", f"{speed:.0f}", f"{memory:.1f}", f"{max(off):.1e}" if off else ""])
    head = ["contender", "seconds a step", "useful tokens/s", "peak resident GB, a rank", "losses off by at most"]
    same = [data["same_malloc"][key] for key in ("ratios", "quartiles")]
    found = tabulate_ratios("ours / theirs", data["ratios"], data["quartiles"])
    if same[0]:
        found += "\n\n" + tabulate_ratios("the same malloc settings in both", *same)
    return found + "\n\n" + table(head, lines)


def tabulate_ratios(what: str, ratios: dict[str, float], quartiles: dict[str, list[float]]) -> str:
    from page import table

    spreads = {pair: f"{low:.3f} to {high:.3f}" for pair, (low, high) in quartiles.items()}
    rows = [[pair, f"{middle:.3f}", spreads[pair]] for pair, middle in ratios.items()]
    return table([what, "tokens/s, median", "quartiles"], rows)


def draw(data: dict, out: Path) -> None:
    """A bar a ratio, with its quartiles; bare loops in grey."""
    import matplotlib.pyplot as plt
    from page import COLOURS, PLAIN

    with plt.rc_context(PLAIN):
        figure, axes = plt.subplots(figsize=(8.4, 0.8 + 0.4 * len(data["ratios"])), layout="constrained")
        for place, (pair, middle) in enumerate(data["ratios"].items()):
            low, high = data["quartiles"][pair]
            colour = COLOURS[0] if "bare" in pair else COLOURS[1]
            axes.barh(place, middle, color=colour, xerr=[[middle - low], [high - middle]], ecolor="#24292f")
            axes.text(0.02, place, f"{middle:.2f}", va="center", color="white", fontsize=9)
        axes.axvline(1, color="#24292f", linewidth=1)
        axes.set_yticks(range(len(data["ratios"])), list(data["ratios"]))
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s, ours / theirs: median and quartiles of rounds")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(out, metadata={"Date": None})
        plt.close(figure)


def show(data: dict, folder: Path = DOCS) -> None:
    """Write the table into peers.md, between its marks, and the plot beside it."""
    page = folder / "peers.md"
    before, _, rest = page.read_text().partition("<!-- measured -->")
    _, _, after = rest.partition("<!-- end -->")
    where = (
        f"{data['settings']['ranks']} ranks on {data['cpu']}, torch {data['torch']}, commit {shortened(data['commit'])}"
    )
    for each in data.get("added", []):
        where += f"; {' and '.join(each['contenders'])} on {each['cpu']}, commit {shortened(each['commit'])}"
    shown = f"{where}.\n\n![ratios](peers.svg)\n\n{tabulate(data)}"
    page.write_text(f"{before}<!-- measured -->\n\n{shown}\n\n<!-- end -->{after}")
    draw(data, folder / "peers.svg")


if __name__ == "__main__":
    show(json.loads((DOCS / "peers.json").read_text()))
