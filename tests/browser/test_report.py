"""The compare page in a real browser: every panel has data, nothing on the console, light and dark, a phone's width,
the keyboard, print. Needs Chromium (Debian: apt-get install chromium); CHROMIUM names another program."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from kept_run import keep_run
from picture import find_chromium
from playwright.sync_api import sync_playwright

from shardbook.compare.compare_page import write_page
from shardbook.compare.data_page import write_data_page
from shardbook.compare.outcome import Outcome
from shardbook.compare.plan_page import write_plan_page
from shardbook.compare.run_page import write_run_page
from shardbook.data.preview import Piece, Preview, SourceCounts, TokenSequence
from shardbook.plan.hardware import build_cluster
from shardbook.plan.report import make_report
from shardbook.recipe import find_recipe, load_recipe

KEPT = Path(__file__).parents[2] / "docs" / "compare.html"
PLAN_PANELS = ["Memory", "Memory over the step", "Traffic", "Time", "Timeline of a step", "Scaling"]
PANELS = ["Loss", "Difference from ddp", "Memory", "Peak of a step", "Traffic", "Throughput"]


def invented(name: str, stage: str, times: float, **more) -> Outcome:
    """An outcome of a GPU, which the kept page has none of."""
    traffic = {"all_gather over dp_shard": 3e9, "all_reduce over dp_shard": 8.0}
    memory = {"params": 1e9 * times, "grads": 1e9 * times, "optimizer": 2e9 * times}
    settings = {
        "model": {"path": "org/model</script>"},
        "data": {"train": "rows.jsonl", "max_length": 512},
        "parallel": {"stage": "zero3"},
        "train": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        "precision": {"params": "bf16", "reduce": "fp32"},
    }
    facts = {"world_size": 8, "torch": "2.13.0", "gpu": "H200"}
    measured = {
        "steps": [1, 2, 3],
        "losses": [3.0, 2.0, 1.0 + times / 100],
        "eval_steps": [0, 3],
        "eval_losses": [3.5, 1.5],
        "memory": {"paper": memory, "predicted": memory, "measured": memory},
        "traffic": {"predicted": traffic, "measured": traffic},
        "sent_bytes": 2e9,
        "inter_node_bytes": 1e9,
        "step_seconds": [0.5, 0.6],
        "tokens_per_second": 5000.0,
        "mfu": 0.5,
        "peak_bytes": 7e10,
    }
    return Outcome(name, stage, True, "", {"dp_replicate": 1, "dp_shard": 8}, facts, settings, **measured | more)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser):
    """Opens a page file; a word on the console, an error or a request of its own fails the test."""
    said = []

    def open_file(path, **how):
        page = browser.new_page(**how)
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: (
                said.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None
            ),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-drawn]")
        return page

    yield open_file
    assert not said, said


def check_panels(page, titles):
    assert [heading.inner_text() for heading in page.query_selector_all("h2")] == ["Verdicts", *titles]
    assert page.evaluate("document.body.dataset.drawn") == str(len(titles))
    for plot in page.query_selector_all(".plot"):
        points = plot.evaluate("p => p.data.map(t => [...(t.x || [])].length)")
        assert points and all(points), (plot.get_attribute("id"), points)
        shapes = "p => p.querySelectorAll('.scatterlayer path.js-line, .barlayer path').length"
        assert plot.evaluate(shapes) >= 1, plot.get_attribute("id")
        assert plot.bounding_box()["height"] > 150


def contrast(page, selector):
    """WCAG's ratio between a text's colour and the page's ground."""
    colours = page.evaluate(
        """s => { const e = document.querySelector(s);
        return [getComputedStyle(e).fill !== 'none' && e instanceof SVGElement ? getComputedStyle(e).fill
          : getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor] }""",
        selector,
    )

    def luminance(text):
        parts = [int(value) / 255 for value in re.findall(r"\d+", text)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted(map(luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_kept_page(opened, scheme, tmp_path):
    page = opened(KEPT, color_scheme=scheme, viewport={"width": 1200, "height": 900})
    check_panels(page, PANELS)
    assert len(page.query_selector_all("#verdicts tbody tr")) == 6
    for text in ("body", "main p", "caption", ".xtick text", ".legendtext", "#plot-memory .annotation text"):
        assert contrast(page, text) > 4.5, (scheme, text)


def test_a_phone(opened):
    page = opened(KEPT, viewport={"width": 390, "height": 844}, is_mobile=True)
    check_panels(page, PANELS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390  # tables scroll on their own
    assert all(plot.bounding_box()["width"] <= 390 for plot in page.query_selector_all(".plot"))
    for name in ("memory", "peak-of-a-step", "traffic"):  # names leave bars two thirds of the width
        bars = page.query_selector_all(f"#plot-{name} .barlayer path")
        boxes = [bar.bounding_box() for bar in bars]
        ends = [(box["x"], box["x"] + box["width"]) for box in boxes if box]
        assert max(end for _, end in ends) - min(begin for begin, _ in ends) >= 260, name


def test_the_keyboard(opened):
    page = opened(KEPT)
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.innerText.slice(0, 12)")
        )
    assert sum(name.startswith("A ") for name in reached) >= len(PANELS)
    assert any(name.startswith("DIV ") for name in reached)  # a table's own scroller
    page.focus("#memory summary")
    page.keyboard.press("Enter")
    assert page.is_visible("#memory table") and not page.is_visible("#traffic table")


def test_print_is_dark_on_white(opened):
    page = opened(KEPT, color_scheme="dark")
    page.emulate_media(media="print")
    page.wait_for_timeout(200)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert contrast(page, ".xtick text") > 4.5 and not page.is_visible("nav")
    assert len(page.pdf()) > 20_000


def test_the_kept_page_shows_what_its_numbers_say(opened):
    """The drawn memory of the page against report.json, which lies beside it."""
    report = json.loads(KEPT.with_suffix(".json").read_text())
    page = opened(KEPT)
    data = page.evaluate(
        "document.getElementById('plot-memory').data.map(t => ({name: t.name, of: t.hovertext, x: Array.from(t.x)}))"
    )
    for trace in data:
        for label, size in zip(trace["of"], trace["x"], strict=True):
            variant, source = label.split(", ")
            (one,) = [one for one in report["variants"] if one["name"] == variant]
            assert size * 2**20 == pytest.approx(one["memory"][source].get(trace["name"], 0))


def test_a_page_of_gpus_with_a_failed_variant_and_hostile_names(opened, tmp_path):
    failed = Outcome("zero1,<img src=x onerror=alert(1)>", "zero1", False, "it ended after step 2")
    write_page(
        tmp_path / "report.html",
        "a <b>&amp;</script>",
        [invented("ddp", "ddp", 1), invented("zero3", "zero3", 0.5), failed],
    )
    page = opened(tmp_path / "report.html")
    known = [name for name in PANELS if name != "Peak of a step"]  # they have no formula
    check_panels(page, [*known, "MFU"])
    assert page.inner_text("h1") == "a <b>&amp;</script>"
    assert "zero1,<img src=x onerror=alert(1)>" in page.inner_text("#verdicts") and not page.query_selector("img")
    assert "50% less memory" in page.inner_text("#verdicts")


def test_equal_losses_have_no_panel_of_differences(opened, tmp_path):
    pair = [invented("ddp", "ddp", 1), invented("zero3", "zero3", 1, losses=[3.0, 2.0, 1.01])]
    write_page(tmp_path / "report.html", "equal", pair)
    page = opened(tmp_path / "report.html")
    check_panels(page, ["Loss", "Memory", "Traffic", "Throughput", "MFU"])
    assert "same losses bitwise; same memory; same peak; same traffic" in page.inner_text("#verdicts")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_plan(opened, scheme, tmp_path):
    report = make_report(load_recipe(find_recipe("llama8b-fsdp")), "h100-80gb", build_cluster("h100-80gb", 16))
    write_plan_page(tmp_path / "plan.html", report)
    for width in (1200, 390):
        page = opened(tmp_path / "plan.html", color_scheme=scheme, viewport={"width": width, "height": 900})
        check_panels(page, PLAN_PANELS)
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert "zero3" in page.inner_text("#verdicts") and "does not fit" in page.inner_text("#verdicts")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_data(opened, scheme, tmp_path):
    ones = [
        Piece(text, trained, 1) for text, trained in (("<b>", False), ("\n", False), ("ok", True), ("!" * 300, True))
    ]
    part = SourceCounts("a.jsonl </script>", np.array([4, 17]), 2, 1, 0)
    look = Preview(
        [("a.jsonl, row 0", [TokenSequence("chosen", ones, 4, 2)])], [part], [(0, 9, 1), (10, 19, 1)], "2 documents"
    )
    write_data_page(tmp_path / "data.html", "mine", look)
    for width in (1200, 390):
        page = opened(tmp_path / "data.html", color_scheme=scheme, viewport={"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert contrast(page, "pre mark") > 4.5 and contrast(page, "#lengths td") > 4.5
        assert [mark.inner_text() for mark in page.query_selector_all("pre mark")] == ["ok", "!" * 300]
        assert page.inner_text("h3 + p") == "chosen: 4 tokens, 2 of them trained"
    assert "17" in page.inner_text("#sources") and page.query_selector("td.bar div").bounding_box()["width"] > 50


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_run(opened, scheme, tmp_path):
    write_run_page(tmp_path / "run.html", keep_run(tmp_path / "mine"))
    for width in (1200, 390):
        page = opened(tmp_path / "run.html", color_scheme=scheme, viewport={"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.body.dataset.drawn") == "7"
        for plot in page.query_selector_all(".plot"):  # a chart of one bar too has its axis
            assert plot.query_selector_all(".xtick text") and plot.bounding_box()["height"] > 120
        assert contrast(page, "pre mark") > 4.5 and contrast(page, ".annotation text") > 4.5
