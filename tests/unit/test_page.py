"""Pages say what the data say."""

import json
import re
from pathlib import Path

import link_fit
import page
import pytest

ROOT = Path(__file__).parents[2]


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
