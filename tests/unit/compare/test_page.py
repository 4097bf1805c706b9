"""Pages say what the data say."""

import html
import json
import re
from pathlib import Path

import link_fit
import page
import pytest

from shardbook.compare.page import LIBRARY, Panel, draw_lines, render

ROOT = Path(__file__).parents[3]


MEASURED = [name for name in page.SHOWN if page.source_of(name).is_file()]


@pytest.mark.parametrize("name", MEASURED)
def test_tables_are_those_of_the_data(name):
    data = json.loads(page.source_of(name).read_text())
    title, _, tabulate = page.SHOWN[name]
    assert tabulate(data) in (ROOT / "docs" / f"{title}.md").read_text()


def test_what_zeropp_promises_holds_in_the_data():
    """Bytes to a seventh, counters and ledger within 3%, faster where the link is slow."""
    medians = json.loads((ROOT / "docs" / "benchmarks" / "link.json").read_text())["medians"]
    for found in medians.values():
        assert found["zeropp"]["wire_bytes"] <= 0.14 * found["zero3"]["wire_bytes"]
        assert all(abs(row["wire_bytes"] / row["ledger_bytes"] - 1) <= 0.03 for row in found.values())
    assert medians["50mbit"]["zero3"]["seconds"] >= 2.16 * medians["50mbit"]["zeropp"]["seconds"]
    assert medians["unlimited"]["zero3"]["seconds"] >= 0.9 * medians["unlimited"]["zeropp"]["seconds"]


@pytest.mark.parametrize("study", [name for name in MEASURED if name not in ("link", "host", "forecast")])
def test_what_is_rounded_learns_as_well(study):
    """Held out, after as many steps, within 0.5% of the first variant, which rounds nothing."""
    runs = json.loads((ROOT / "docs" / "benchmarks" / f"{study}.json").read_text())
    base = next(iter(runs["variants"].values()))["eval"][-1]
    assert runs["steps"] >= 150
    for name, found in runs["variants"].items():
        assert abs(found["eval"][-1] / base - 1) <= 0.005 or "4 bits" in name, name


def test_what_offload_asks_of_a_host_holds_in_the_data():
    """Pieces of AdamW, transfers and their ring near what bounds them, and most of the host's step hidden."""
    data = json.loads((ROOT / "docs" / "benchmarks" / "host.json").read_text())
    parts = {name: ratio for name, ratio, _ in page.ratios_of(data)}
    least = {"AdamW": 0.9, "read": 0.8, "write": 0.8, "ring": 1 / 1.15, "host": 0.7}
    for name, ratio in parts.items():
        assert ratio >= least[re.match(r"\w+", name)[0]], (name, ratio)
    assert len(parts) == 5


def test_the_plans_time_holds_on_the_links_of_the_bench():
    """Two variants at one rate calibrate it; every other one, at every rate, is within 15%."""
    medians = json.loads(page.source_of("forecast").read_text())["medians"]
    predicted = link_fit.predict(medians)
    for rate, found in medians.items():
        for name, row in found.items():
            assert abs(predicted[rate][name] / row["seconds"] - 1) <= 0.15, (rate, name)
    assert sum(map(len, predicted.values())) == 20


ROWS = [
    (("a<b>,c", "predicted"), {"params": 2.0**20, "grads": 2.0**21}),
    (("zero3", "measured"), {"params": 3 * 2.0**20}),
]
STEPS = [(0, {"x, held out": 3.5}), (1, {"x": 3.25, "y": 0.1 + 0.2}), (12, {"x": 2.0, "y": 1.0})]
SPAN = dict(zip("abcde", (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
PANELS = [
    Panel("Bars of bytes", "said", ROWS, "bars", ("variant", "source"), unit="MiB", scale=2**20, form=",.0f", limit=2),
    Panel("Lines", "said", STEPS, "lines", ("step",), remarks={(12, "y"): " (late)"}),
    Panel("Spans", "said", [("one", SPAN), ("two", SPAN)], "spans"),
    Panel("Counts", "said", [("0 to 9", {"rows": 4}), ("10 to 19", {"rows": 1})], "counts", ("tokens",)),
    Panel("Tokens", "said", [("row 0", {"2 tokens": [("<i>\n", False), ("ok", True)]})], "tokens"),
]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    render(path, "a </script>", ["about <b>"], PANELS)
    return path.read_text()


def figures(text):
    return json.loads(re.search(r"^const figures = (.*);$", text, re.M)[1])


def cells(text, panel):
    """The rows of a panel's table, as texts."""
    section = re.search(rf'<section id="{panel}".*?</section>', text, re.S)[0]
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", section, re.S)]
    return [[html.unescape(cell.replace("<wbr>", "")) for cell in row] for row in rows]


def test_a_figure_and_its_table_have_the_same_numbers(rendered):
    shown, drawn = cells(rendered, "bars-of-bytes"), figures(rendered)["bars-of-bytes"]["data"]
    assert shown[0] == ["variant", "source", "params", "grads", "total"]
    assert shown[1] == ["a<b>,c", "predicted", "1,048,576", "2,097,152", "3,145,728"]
    assert shown[2] == ["zero3", "measured", "3,145,728", "0", "3,145,728"]
    assert [[size * 2**20 for size in trace["x"]] for trace in drawn] == [
        [int(row[at].replace(",", "")) for row in shown[1:]] for at in (2, 3)
    ]
    shown, drawn = cells(rendered, "lines"), figures(rendered)["lines"]["data"]
    assert shown[1:] == [
        ["0", "3.5", "", ""],
        ["1", "", "3.25", "0.30000000000000004"],
        ["12", "", "2.0", "1.0 (late)"],
    ]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in drawn] == [
        ("x, held out", [0], [3.5]),
        ("x", [1, 12], [3.25, 2.0]),
        ("y", [1, 12], [0.1 + 0.2, 1.0]),
    ]
    (low, middle, mark) = figures(rendered)["spans"]["data"]
    assert (low["x"][:2], middle["x"][:2], mark["x"]) == ([1.0, 5.0], [2.0, 4.0], [3.0, 3.0])
    assert re.findall(r'style="width: ([\d.]+)%"', rendered) == ["100.0", "25.0"] and "counts" not in figures(rendered)


def test_a_page_is_whole_small_and_named_for_a_reader(rendered):
    own = rendered.replace(LIBRARY.read_text(), "")
    assert len(rendered) < 1_500_000 and not re.search(r'(src|href)="(?!#|data:)', own)
    assert re.findall(r"<h(\d)", own) == ["1", *"2" * len(PANELS), "3"]  # none is left out on the way down
    assert own.count("<table>") == own.count("<caption>") == own.count('tabindex="0" role="region" aria-label=') == 4
    assert len(re.findall(r'<th(?! scope="(?:row|col)")[ >]', own)) == 0 and own.count('aria-labelledby="heading-') == 5
    assert "<pre><span>&lt;i&gt;↵</span>\n<mark>ok</mark></pre>" in own and "<h1>a &lt;/script&gt;</h1>" in own
    assert "<p>about &lt;b&gt;</p>" in own and own.count("</script>") == 2


def test_steps_on_an_axis_are_whole(rendered):
    assert figures(rendered)["lines"]["layout"]["xaxis"] == {
        "title": {"text": "step"},
        "tickformat": ",d",
        "automargin": True,
    }
    short = draw_lines(Panel("Lines", "", STEPS[:2], "lines", ("step",)))
    assert short["layout"]["xaxis"]["dtick"] == 1


def test_the_kept_page_of_a_comparison_is_small():
    assert (ROOT / "docs" / "compare.html").stat().st_size < 1_500_000
