"""What the comparison says of two runs, from their numbers; and of a run directory that is not whole."""

import json
import re
from dataclasses import replace

import pytest
from kept_run import keep_run

from shardbook import cli
from shardbook.compare.compare_page import summary_rows
from shardbook.compare.outcome import Outcome, differences, first_difference, judge, read_outcome
from shardbook.compare.page import LIBRARY, broken
from shardbook.recipe import RecipeError
from shardbook.run.log.recorder import read_rows


def outcome(name, steps, losses, kept=100.0, sent=50.0):
    memory = {"measured": {"params": kept / 2, "grads": kept / 2}}
    return Outcome(name, name, True, "", steps=steps, losses=losses, memory=memory, sent_bytes=sent)


BASE = outcome("ddp", [1, 2, 3], [4.0, 2.0, 1.0])


@pytest.mark.parametrize(
    "one, verdict",
    [
        (outcome("a", [1, 2, 3], [4.0, 2.0, 1.0]), "same losses bitwise; same memory; same traffic"),
        (outcome("a", [2, 3], [2.0, 1.0], 25, 75), "same losses bitwise; 75% less memory; 1.5x traffic"),
        (
            outcome("a", [1, 2, 3], [4.0, 2.000002, 1.0], 200),
            "same losses but for rounding (1e-06, from step 2);",
        ),
        (outcome("a", [1, 2, 3], [4.0, 2.0002, 1.0]), "losses differ from step 2, by 0.01% at most; same memory"),
        (outcome("a", [1, 2, 3], [8.8, 2.0, 1.0]), "losses differ from step 1, by 120% at most; same memory"),
        (outcome("a", [5, 6], [4.0, 2.0], sent=11_000), "no step that both logged; same memory; 220x traffic"),
    ],
)
def test_verdicts(one, verdict):
    assert judge(one, BASE).startswith(verdict)


def test_other_rows_a_step_are_said_in_place_of_other_losses():
    """Ranks along tp, cp and pp have a micro-batch together; runs of versions before them have no such key."""

    def ran(**parallel):
        train = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
        settings = {"train": train, "parallel": {"stage": "zero3", **parallel}}
        return replace(BASE, losses=[4.1, 2.0, 1.0], settings=settings, facts={"world_size": 8})

    alone, shared = ran(), ran(tp_size=2, pp_size=2)
    assert (alone.rows, shared.rows, BASE.rows) == (48, 12, 0)
    assert judge(shared, alone).startswith("12 rows a step in place of 48, so other losses; same memory")
    assert judge(ran(cp_size=1), alone).startswith("same losses bitwise")


def test_axes_inside_a_model_stand_by_name_in_a_mesh():
    ranks = {"dp_replicate": 1, "dp_shard": 2}
    one, two = (replace(BASE, mesh=mesh) for mesh in (ranks, {"pp": 2, **ranks, "tp": 4}))
    mesh = "(pp x) replicas x shards (x tp)"
    assert [row[mesh] for _, row in summary_rows([one, two])] == ["1 x 2", "pp 2 x 1 x 2 x tp 4"]
    assert "replicas x shards" in summary_rows([one])[0][1]


def test_a_long_name_is_broken_in_a_figure():
    name = "zero1," + ",".join(f"parallel.key_{number}=interleaved" for number in range(5))
    assert broken(name).replace("<br>", "") == name and broken("a" * 50).replace("<br>", "") == "a" * 50
    assert max(map(len, broken(name).split("<br>"))) <= 46 and broken("zero3") == "zero3"
    assert broken("zero3, <i>") == "zero3, &lt;i&gt;"


def test_the_peak_of_a_step_tells_apart_what_is_kept_alike():
    base = replace(BASE, peak={"params": 60.0, "gathered": 40.0})
    zero2, zero3 = (replace(BASE, name=name, peak={"params": 15.0, "gathered": gathered}) for name, gathered in
                    (("zero2", 40.0), ("zero3", 5.0)))  # fmt: skip
    assert "; same memory; 45% lower peak by formula; same traffic" in judge(zero2, base)
    assert "; 80% lower peak by formula; " in judge(zero3, base)
    assert "; 20% higher peak; " in judge(replace(zero3, peak_bytes=120.0), replace(base, peak_bytes=100.0))
    assert "peak" not in judge(replace(zero3, peak_bytes=120.0), base)  # a measurement is not held against a formula


def test_a_loss_of_nothing_is_no_division_by_zero():
    zero = outcome("ddp", [1, 2], [1.0, 0.0])
    assert differences(outcome("a", [1, 2], [1.0, 0.25]), zero) == {1: 0.0, 2: 0.25}
    assert first_difference(zero, zero) is None


WHOLE = {
    "resolved.toml": '[parallel]\nstage = "ddp"\n',
    "run.json": '{"finished_steps": 5, "mesh": {}}',
    "metrics.jsonl": '{"step": 1, "train/loss": 1.0, "comm/sent_bytes": 1, "comm/inter_node_bytes": 0, '
    '"perf/step_seconds": 1}\n',
}


@pytest.mark.parametrize(
    "file, text, note",
    [
        ("run.json", None, "it ended before its first step"),
        ("run.json", "[]", "its files are damaged"),
        ("run.json", "{}", "its files are damaged ('finished_steps')"),
        ("run.json", '{"finished_', "its files are damaged"),
        ("resolved.toml", "", "its files are damaged ('parallel')"),
        ("metrics.jsonl", "3\n", "its files are damaged"),
        ("metrics.jsonl", None, "it ended before its first step"),
        ("metrics.jsonl", b"\xff\xfe\n", "its files are damaged"),
        ("metrics.jsonl", "", "it logged no step (train.logging_steps = 1)"),
    ],
)
def test_a_run_that_is_not_whole_is_said_and_the_rest_go_on(file, text, note, tmp_path):
    for name, content in (WHOLE | {file: text}).items():
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = read_outcome(tmp_path, "ddp")
    assert not found.finished and found.note.startswith(note), found.note


def test_a_row_that_a_kill_tore_is_left_out(tmp_path):
    """It may end within a character, and what a model writes may have marks that some take for the end of a line."""
    rows = [{"text": "a\u2028b\x85c"}, {"text": "größer"}]
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    for length in range(len(lines[1])):
        (tmp_path / "samples.jsonl").write_bytes(lines[0] + lines[1][:length])
        assert read_rows(tmp_path / "samples.jsonl") == rows[:1]
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines))
    assert read_rows(tmp_path / "samples.jsonl") == rows
    (tmp_path / "samples.jsonl").write_bytes(lines[0] + lines[1][:9] + b"\n" + lines[1])
    with pytest.raises(RecipeError, match=r"samples\.jsonl: row 2 is damaged"):
        read_rows(tmp_path / "samples.jsonl")


@pytest.mark.parametrize(
    ("mesh", "train", "seconds"),
    [
        ({"dp_shard": 2}, "compile = true", [2, 3]),
        ({"dp_shard": 2, "tp": 2}, "compile = false", [2, 3]),
        (
            {"dp_shard": 2, "tp": 2},
            "compile = true",
            [3],
        ),  # compiled in the second: the ledger held the first one eager
        ({"dp_shard": 2, "cp": 2}, "compile = true", [3]),
        ({"dp_shard": 2, "cp": 2}, "compile = true\nlogging_steps = 10", [2, 3]),
    ],
)
def test_times_are_of_steps_that_make_nothing_for_the_first_time(mesh, train, seconds, tmp_path):
    row = json.loads(WHOLE["metrics.jsonl"])
    rows = [row | {"step": number, "perf/step_seconds": number} for number in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text(json.dumps({"finished_steps": 3, "mesh": mesh}))
    (tmp_path / "resolved.toml").write_text(f"{WHOLE['resolved.toml']}[train]\n{train}\n")
    assert read_outcome(tmp_path, "a").step_seconds == seconds


def test_the_whole_one_is_read(tmp_path):
    for name, content in WHOLE.items():
        (tmp_path / name).write_text(content)
    assert read_outcome(tmp_path, "ddp").losses == [1.0]


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_damaged_list_of_variants(text, tmp_path, capsys):
    (tmp_path / "variants.json").write_text(text)
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert f"{tmp_path}/variants.json: damaged (" in capsys.readouterr().err


def test_a_disk_that_does_not_take_the_report(tmp_path, capsys):
    run = tmp_path / "ddp"
    run.mkdir()
    for name, content in WHOLE.items():
        (run / name).write_text(content)
    (tmp_path / "variants.json").write_text(json.dumps({"ddp": "ddp"}))
    (tmp_path / "report.json").mkdir()
    assert cli.main(["compare", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"shardbook: {tmp_path}/report.json: Is a directory\n"


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ([125.0, 126, 124, 125, 127, 125], "; 25% faster"),
        ([80.0, 81, 79, 80, 82, 80], "; 20% slower"),
        ([80.0, 81, 79, 80, 130] * 8, ""),  # in one step of five it was faster
        ([80.0] * 19 + [130], "; 20% slower"),
        ([101.0, 99, 104, 98, 100, 100], ""),  # among the other's steps
        ([100.2] * 6, ""),
        ([125.0, 126, 124, 125, 125], ""),  # too few to know their noise
    ],
)
def test_speed_is_said_where_it_differs_by_more_than_noise(speeds, said):
    base = replace(BASE, speeds=[78.0, *[101.0, 99, 100, 102, 99, 100] * 7])
    verdict = judge(replace(base, name="a", speeds=speeds), base)
    assert verdict == f"same losses bitwise; same memory; same traffic{said}"


def test_a_first_step_that_is_slow_in_both_is_no_noise():
    """In 12 of 100 pairs of unlike steps this one would be the faster."""
    base = replace(BASE, speeds=[78.0, 101, 99, 100, 102, 99, 100])
    assert judge(replace(base, name="a", speeds=[70.0, *[80.0] * 6]), base).endswith("; 20% slower")


def test_any_variant_can_be_the_one_that_others_are_held_against(tmp_path, capsys):
    for name, speed in (("ddp", 100.0), ("zero3", 150.0)):
        keep_run(tmp_path / name, speed=speed)
    keep_run(tmp_path / "zero1", losses=(4.0,), finished=False)
    assert cli.main(["compare", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["baseline"] == "ddp"
    assert cli.main(["compare", str(tmp_path), "--beside", "zero3"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["baseline"] == "zero3" and [one["name"] for one in report["variants"]] == ["zero3", "ddp", "zero1"]
    assert report["variants"][1]["verdict"].endswith("; 32% slower")
    page = (tmp_path / "report.html").read_text()
    assert "Each variant beside zero3" in page and "zero3 and ddp have the same curve, bit for bit" in page
    capsys.readouterr()
    for beside, said in (
        ("zero2", "no such variant; did you mean zero3?; there are ddp, zero1, zero3"),
        ("zero1", "it ended after step 1; name a variant that finished"),
    ):
        assert cli.main(["compare", str(tmp_path), "--beside", beside]) == 2
        assert capsys.readouterr().err.startswith(f"shardbook: --beside {beside}: {said}")


RECIPE = "name a recipe with --stages, or the directory that a comparison made; its own page"


def test_one_run_is_no_comparison_and_the_other_way_round(tmp_path, capsys):
    run = keep_run(tmp_path / "mine")
    for words, said in (
        (["compare", run], f"{run} is one run, and a comparison has several: {RECIPE}: shardbook report {run}"),
        (["report", tmp_path], f"{tmp_path}: a comparison; its page: shardbook compare {tmp_path}"),
        (["report", tmp_path / "none"], f"{tmp_path}/none: not a run (no resolved.toml in it)"),
        (["report", run, "--html", run / "run.json"], f"--html {run}/run.json: exists; name a new file"),
    ):
        assert cli.main([*map(str, words)]) == 2
        assert capsys.readouterr().err == f"shardbook: {said}\n"


def test_a_run_has_a_page(tmp_path, capsys):
    run = keep_run(tmp_path / "mine", **{"train/rewards/margin": 0.5})
    assert cli.main(["report", str(run)]) == 0 and capsys.readouterr().out == f"report   {run}/report.html\n"
    page = (run / "report.html").read_text().replace(LIBRARY.read_text(), "")
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    curves = ["Loss", "Learning rate", "Gradient norm", "Speed", "rewards/margin"]
    assert titles == ["Numbers", *curves, "Memory", "Peak of a step", "Traffic", "Samples"]  # none of what is always 0
    for number in ("<td>4.5</td>", "<td>2.25</td>", "<td>1e-05</td>", "<td>1,048,576</td>", "<td>3,145,728</td>"):
        assert number in page, number
    assert "why &lt;b&gt;?" in page and "<mark>at 12↵</mark>" in page
    assert ["step 0" in page, "step 4" in page, "step 12" in page] == [True, False, True]  # the first, the last four
    assert cli.main(["report", str(run)]) == 0  # its own page is made again
    going = keep_run(tmp_path / "going", losses=(4.0,), finished=False)
    assert cli.main(["report", str(going)]) == 0
    assert "Of the last of 1 steps, not finished" in (going / "report.html").read_text()
    empty = keep_run(tmp_path / "empty", losses=(), finished=False)
    capsys.readouterr()
    assert cli.main(["report", str(empty)]) == 2
    assert capsys.readouterr().err == f"shardbook: {empty}: it ended after step 0; there is nothing to show\n"
