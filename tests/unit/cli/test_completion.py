"""Shell completion: what bash offers, asked of bash itself, and that the other shells' scripts have the same tables."""

import re
import subprocess

import pytest

from shardbook import cli
from shardbook.recipe import describe_keys, list_recipes

ASK = """
compopt() { :; }
ask() { COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _shardbook; echo "${COMPREPLY[*]}"; }
"""


def script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def offered(capsys):
    """What bash offers behind each of the given command lines, whose `=` it takes for words of their own."""

    def ask(*lines):
        asked = "".join(f"ask shardbook {line}\n" for line in lines)
        done = subprocess.run(["bash", "-c", script("bash", capsys) + ASK + asked], capture_output=True, text=True)
        assert not done.stderr, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    return ask


def test_bash_completes_commands_recipes_keys_and_values(offered):
    lines = {
        "pl": ["plan"],
        "train smollm2-135m-f": ["smollm2-135m-fsdp"],
        "train a parallel.st": ["parallel.stage="],
        "train a parallel.stage =": ["ddp", "zero1", "zero2", "zero3", "hsdp", "zeropp", "fsdp"],
        "train a parallel.stage = ze": ["zero1", "zero2", "zero3", "zeropp"],
        "train a train.compile = t": ["true"],
        "train a data.train = d": [],  # files, which bash itself offers then
        "plan --gpu h1": ["h100-80gb"],
        "export a --dt": ["--dtype"],
        "export a --dtype ''": ["fp32", "bf16"],
        "init mine --of llama8b-q": ["llama8b-qlora-1gpu"],
        "completion z": ["zsh"],
        "verify ''": [],
    }
    assert dict(zip(lines, offered(*lines), strict=True)) == lines


def test_every_recipe_and_key_is_offered(offered):
    ((*words,),) = offered("train ''")
    flags = {word for word in words if word.startswith("--")}
    assert "--max-restarts" in flags
    assert {*words} - flags == {*list_recipes()} | {f"{name}=" for name, _, _ in describe_keys()}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_every_shell_has_the_same_tables(shell, capsys):
    mine, bash = (
        re.findall(r"'([^'\n]*)'\)?\s*(?:echo|string split ' ' --) '([^']*)'", script(each, capsys))
        for each in (shell, "bash")
    )
    assert mine == bash and len(bash) > 40


def test_a_shell_that_is_not_known_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "csh"])
    assert "invalid choice: 'csh'" in capsys.readouterr().err
