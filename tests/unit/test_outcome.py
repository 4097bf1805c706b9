"""What the comparison says of two runs, from their numbers; and of a run directory that is not whole."""

import json
from dataclasses import replace

import pytest

from shardbook import cli
from shardbook.compare.compare_page import summary_rows
from shardbook.compare.outcome import Outcome, differences, first_difference, judge, read_outcome
from shardbook.compare.page import broken


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
        ("metrics.jsonl", b"\xff\xfe\n", "its files are damaged"),
        ("metrics.jsonl", "", "it logged no step"),
    ],
)
def test_a_run_that_is_not_whole_is_said_and_the_rest_go_on(file, text, note, tmp_path):
    for name, content in (WHOLE | {file: text}).items():
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = read_outcome(tmp_path, "ddp")
    assert not found.finished and found.note.startswith(note), found.note


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
