"""Configuration files, read: JSON, YAML, and the arguments of a command in a shell script."""

import itertools
import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from shardbook.recipe import RecipeError, first_line

SHELL = (".sh", ".bash", ".slurm", ".sbatch")
VARIABLE = re.compile(r"[$`]")
CONFIGS = (".yaml", ".yml", ".json")
MODULES = {"axolotl.cli.train": "axolotl train"}
LAUNCHERS = {"accelerate": "accelerate", "accelerate.commands.launch": "accelerate", "torchrun": "torchrun"}
LAUNCHERS |= {"torch.distributed.run": "torchrun", "deepspeed": "deepspeed"}
OTHERS = ("pip", "pip3", "uv", "conda", "echo", "cd", "git")  # commands that may name a program
TRAINERS = ("trl", "llamafactory-cli", "axolotl")  # commands, before one of what they do


def read_keys(path: Path) -> dict[str, Any]:
    """Returns the keys of a JSON or YAML file. Raises RecipeError where it cannot be read, or holds no keys."""
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = path.read_text()
        if kind == "JSON":
            keys = json.loads(text, object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
        else:
            keys = yaml.load(text, _Loader)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark, what = error.problem_mark, " ".join(filter(None, (error.context, error.problem)))
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError(f"{path}: not YAML: {what}{where}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: not {kind}: {first_line(error)}") from None
    if not isinstance(keys, dict) or not keys:
        raise RecipeError(f"{path}: must be a configuration of keys and values, at least one")
    return keys


def _once(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    if twice := [name for name, count in Counter(str(name) for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"{', '.join(twice)}: more than once")
    return dict(pairs)


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text}: not a finite number")
    return value


class _Loader(yaml.SafeLoader):
    """Reads YAML as the programs do, and 1e-4 as a number, which YAML 1.1 takes for text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _once([(key.value, None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


def _finite_node(loader: _Loader, node: yaml.ScalarNode) -> float:
    if not isfinite(value := loader.construct_yaml_float(node)):
        raise ValueError(f"{node.value}: not a finite number")
    return value


_Loader.add_constructor("tag:yaml.org,2002:float", _finite_node)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_command(path: Path) -> "Command":
    """Returns the one command in a shell script that starts a training program. Raises RecipeError."""
    try:
        script = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {first_line(error)}") from None
    script = _with_values(script.replace("\\\n", " "))
    commands = [words for line in script.splitlines() for words in _split(path, line)]
    commands = [words for words in commands if any(map(_starts, words[:-1])) and words[0] not in OTHERS]
    if len(commands) != 1:
        what = f"{len(commands)} commands of a training program" if commands else "no command of a training program"
        raise RecipeError(f"{path}: holds {what} with arguments (--name value); one is translated")
    [words] = commands
    at = next(at for at, word in enumerate(words) if _starts(word))
    program, rest = MODULES.get(words[at], Path(words[at]).name), words[at + 1 :]
    if program in TRAINERS and not rest[0].startswith("-"):
        program = f"{program} {rest.pop(0)}"
    plain = list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
    arguments = _arguments(path, rest[len(plain) :])
    for word in plain:
        name, equals, value = word.partition("=")
        if word.endswith(CONFIGS):
            arguments.setdefault("config", word)
        elif equals and name.isidentifier():
            arguments[name] = _value(value)
        else:
            kind = "a variable of the shell: write its value" if VARIABLE.search(word) else "not --name value"
            raise RecipeError(f"{path}: {word}: {kind}")
    if exported := [word for word in words[:at] if re.match(r"(ACCELERATE|FSDP|DEEPSPEED)_\w+=", word)]:
        raise RecipeError(f"{path}: {exported[0]}: a variable of the environment; write it as an argument")
    launched = [place for place, word in enumerate(words[:at]) if Path(word).name in LAUNCHERS]
    place, launcher = (launched[0], LAUNCHERS[Path(words[launched[0]]).name]) if launched else (0, "")
    before = [word for word in words[place:at] if word not in ("launch", "-m", "-u", "python", "python3")]
    return Command(program, arguments, launcher, _arguments(path, before))


ASSIGNED = re.compile(
    r"""^\s*(?:export\s+)?(\w+)=(?:([^\s;&|'"$`]*)|'([^']*)'|"([^"$`]*)")\s*;?\s*(?:\#.*)?$""", re.MULTILINE
)


def _with_values(script: str) -> str:
    """Returns a script with the values of variables that it assigns once, as NAME=value without another variable."""
    for name, *values in ASSIGNED.findall(script):
        value = "".join(values)
        elsewhere = rf"\b{name}\+?=|\bfor\s+{name}\b|\bread\b.*\b{name}\b"
        if len(re.findall(elsewhere, script)) == 1:
            script = re.sub(rf"\$\{{{name}\}}|\${name}\b", value.replace("\\", r"\\"), script)
    return script


@dataclass(frozen=True)
class Command:
    """A command that starts training: what it runs ("sft.py", "trl dpo"), with its arguments by name, and its launcher
    ("torchrun", "accelerate", or none) with those that stand before it."""

    program: str
    arguments: dict[str, Any]
    launcher: str
    of_launcher: dict[str, Any]


def _split(path: Path, line: str) -> list[list[str]]:
    """Returns the words of each command of a line, without what is redirected. Raises RecipeError for a line that
    cannot be read, unless it starts no training program."""
    line = re.sub(r"\s\d>&?\s*\S+", " ", line)  # 2>&1
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        tokens = list(lexer)
    except ValueError as error:
        if not any(map(_starts, line.split())):
            return []
        raise RecipeError(f"{path}: not a shell script: {first_line(error)}: {line.strip()[:80]}") from None
    commands: list[list[str]] = [[]]
    for token in itertools.takewhile(lambda token: not token.startswith("#"), tokens):
        if token and set(token) <= set(";&|<>"):
            commands.append([])
        else:
            commands[-1].append(token)
    return commands


def _starts(word: str) -> bool:
    return Path(word).name in TRAINERS or word in MODULES or (word.endswith(".py") and not word.startswith("-"))


def _arguments(path: Path, command: list[str]) -> dict[str, Any]:
    """Returns the arguments `--name value`, `--name=value`, `--name` (true), `--no_name` (false) and `--name a b` (a
    list)."""
    arguments: dict[str, list[Any]] = {}
    values: list[Any] = []
    for word in command:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [_value(value)] if equals else []
            if name in arguments:
                raise RecipeError(f"{path}: --{name}: more than once")
            arguments[name] = values
        else:
            values.append(_value(word))
    read: dict[str, Any] = {}
    for name, values in arguments.items():
        is_no = name.startswith("no_") and not values and name not in ("no_cuda", "no_python")
        name = name.removeprefix("no_") if is_no else name  # as HfArgumentParser writes that it is false
        if name in read:
            raise RecipeError(f"{path}: --{name}: more than once")
        read[name] = not is_no if not values else values[0] if len(values) == 1 else values
    return read


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
WORDS = {"true": True, "false": False, "null": None}


def _value(word: str) -> Any:
    """Returns a word of a command line: a number, true, false or null, a list or a table as JSON; all else is text."""
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    if NUMBER.fullmatch(word):
        return int(word) if word.lstrip("+-").isdigit() else float(word)
    try:
        return json.loads(word) if word[:1] in "[{" and word else word
    except ValueError:
        return word
