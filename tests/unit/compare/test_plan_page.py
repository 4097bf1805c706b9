"""The page of a plan draws the numbers of its report."""

import json

import pytest

from shardbook.cli import main


def test_the_page_draws_the_report(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main(["plan", "llama8b-fsdp", "--gpus", "16", "--json", "--html", str(page)]) == 0
    report, text = json.loads(capsys.readouterr().out), page.read_text()
    figures = json.JSONDecoder().raw_decode(text, text.index('{"memory"'))[0]
    assert list(figures) == ["memory", "memory-over-the-step", "traffic", "time", "timeline-of-a-step", "scaling"]
    for name, key, unit in (("memory", "peak", 1e9), ("time", "step", 1.0)):
        drawn = {
            (trace["name"], stage): x
            for trace in figures[name]["data"]
            for stage, x in zip(trace["hovertext"], trace["x"], strict=True)
        }
        told = {(term, row["stage"]): value / unit for row in report["stages"] for term, value in row[key].items()}
        assert drawn == told
    speeds = {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in figures["scaling"]["data"]}
    for row in report["stages"]:
        assert speeds[row["stage"]][16] == pytest.approx(row["tokens_per_second_per_device"])
    assert 8 not in speeds["hsdp"]  # one node
    assert main(["plan", "llama8b-fsdp", "--html", str(page)]) == 2
    assert main(["plan", "llama8b-fsdp", "--html", str(tmp_path / "none" / "page.html")]) == 2
