"""The run directory: what a run that goes on finds in it."""

from datetime import date

from shardbook.run.directory import RunDirectory, first_day, read_facts


def test_the_first_day_is_that_of_the_run(tmp_path, monkeypatch):
    """Also of a run that was stopped before its first step; then that of the checkpoint it begins with, also behind a
    link, or where its checkpoints are; a checkpoint that is in no run has none."""
    monkeypatch.chdir(tmp_path)
    run, elsewhere = tmp_path / "runs" / "one", tmp_path / "disk" / "step-000002"
    for made in (run, elsewhere):
        made.mkdir(parents=True)
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    (run / "resolved.toml").write_text('[data]\nchat_template_date = "2020-01-01"\n')
    (tmp_path / "latest").symlink_to(run / "checkpoints" / "step-000002")
    for way in (run / "checkpoints" / "step-000002", "runs/one/checkpoints/step-000002"):
        assert first_day({}, way) == "2020-01-01"
    for way in ("", "/ckpt", tmp_path / "else"):
        assert first_day({}, way) == first_day(read_facts(tmp_path / "new"), way) == str(date.today())
    RunDirectory("new", tmp_path / "new", finished_steps=0, is_held=False).open(keep=2, saved=0, day="2021-02-03")
    assert first_day(read_facts(tmp_path / "new"), run / "checkpoints" / "step-000002") == "2021-02-03"
