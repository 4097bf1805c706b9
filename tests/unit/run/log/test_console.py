"""The console: what a person sees of a step."""

from shardbook.run.log.console import Console, describe_peak


def test_what_one_watches_is_on_the_console(capsys):
    """Of pairs accuracy and margin, of a student its divergence; of a row that has only held-out ones those."""
    console = Console(is_main=True)
    console.steps = 9
    console.show_step(3, {"train/loss": 0.5, "train/rewards/accuracies": 0.625, "train/rewards/margins": 0.25})
    console.show_step(0, {"eval/loss": 0.7, "eval/accuracy": 0.5, "eval/margin": -0.125})
    console.show_step(4, {"train/loss": 0.5, "train/kl": 0.03125, "eval/loss": 0.25, "eval/kl": 9.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 3/9  loss 0.5000  accuracy 62%  margin 0.250",
        "step 0/9  eval 0.7000  accuracy 50%  margin -0.125",
        "step 4/9  loss 0.5000  eval 0.2500  kl 0.0312",
    ]


def test_a_peak_that_is_off_is_said():
    def said(measured):
        return describe_peak({"memory/peak_bytes": measured, "predicted/memory/peak_bytes": 100 * 2**30})

    assert said(104 * 2**30) == said(96 * 2**30) == "" == describe_peak({"memory/peak_bytes": 1.0})
    assert said(80 * 2**30) == "peak     80.0 GiB measured, 100.0 GiB predicted: +25%"
