"""What a user sees of a plain run: its own lines, and no warning of a library's."""

import os
import re
import subprocess
import sys

import pytest

WORDS = ["data.max_length=64", "train.steps=2", "train.per_device_train_batch_size=1", "data.eval_size=0.001"]
WORDS += ["activation.checkpointing=selective", "offload.activations=cpu", "run.report_to=none", "generate.steps=2"]
WORDS += ['generate.prompts=["Hi"]', "generate.max_new_tokens=4"]
# how lines begin that a run of this recipe prints, beside the table of its layout
OWN = "run|train|eval|effective|forecast|samples|weights|versions|step|sample|traffic|peak|saved|export|done|continue"


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}


@pytest.mark.slow
@pytest.mark.newest
def test_no_library_warns(tmp_path):
    command = [sys.executable, "-m", "shardbook.cli", "train", "smollm2-135m-fsdp", "--nproc", "2", *WORDS]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=plain_environment())
    assert ended.returncode == 0, ended.stderr
    shown = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    others = [line for line in shown if not re.match(rf"({OWN})\b|[│┌├└┡┏╭╰ ]", line)]
    assert not others, others
    assert any(line.startswith("sample ") for line in shown) and "arning" not in ended.stdout + ended.stderr
