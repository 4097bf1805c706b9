"""Configuration files, read: JSON, YAML, and the arguments of a command in a shell script."""

import json
import re
import shlex
from collections import Counter
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from shardbook.recipe import RecipeError, first_line

SHELL = (".sh", ".bash", ".slurm", ".sbatch")
VARIABLE = re.compile(r"\$[{(\w]|`")
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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_commands(path: Path) -> list[list[str]]:
    """Returns the words of each command in a shell script that starts a training program. Raises RecipeError."""
    try:
        script = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {first_line(error)}") from None
    commands = []
    for line in script.replace("\\\n", " ").splitlines():
        try:
            command = shlex.split(line, comments=True)
        except ValueError as error:
            raise RecipeError(f"{path}: not a shell script: {first_line(error)}: {line.strip()[:80]}") from None
        if any(is_script(word) or word in TRAINERS for word in command) and any(
            word.startswith("--") for word in command
        ):
            commands.append(command)
    return commands


def is_script(word: str) -> bool:
    return word.endswith(".py") and not word.startswith("-")


def read_command(path: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns of the one command in a shell script that starts a training program: what it starts ("sft.py", "trl
    dpo"), the arguments of that, and those of the launcher before it, by name. Raises RecipeError."""
    commands = read_commands(path)
    if len(commands) != 1:
        what = f"{len(commands)} commands of a training program" if commands else "no command of a training program"
        raise RecipeError(f"{path}: holds {what} with arguments (--name value); one is translated")
    [command] = commands
    at = next(at for at, word in enumerate(command) if is_script(word) or word in TRAINERS)
    program, rest = Path(command[at]).name, command[at + 1 :]
    while rest and not rest[0].startswith("-") and not rest[0].endswith((".yaml", ".yml", ".json")):
        program = f"{program} {rest.pop(0)}"
    if rest and not rest[0].startswith("-"):
        rest.insert(0, "--config")
    return program, _arguments(path, rest), _arguments(path, command[:at])


def _arguments(path: Path, command: list[str]) -> dict[str, Any]:
    """Returns the arguments `--name value`, `--name=value`, `--name` (true) and `--name a b` (a list)."""
    arguments: dict[str, Any] = {}
    values: list[Any] = []
    for word in command:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [_value(value)] if equals else []
            if name in arguments:
                raise RecipeError(f"{path}: --{name}: more than once")
            arguments[name] = values
        elif word in ("|", ">", "2>&1", "&", ";", "&&", ">>", "2>"):
            break
        elif arguments:
            values.append(_value(word))
    # `--no_x` is how HfArgumentParser writes that x is false
    return {
        name.removeprefix("no_") if not values else name: _joined(values) if values else not name.startswith("no_")
        for name, values in arguments.items()
    }


def _joined(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _value(word: str) -> Any:
    """Returns a word of a command line as YAML would read it: a number, true or false, a list, else text."""
    if VARIABLE.search(word):
        return word
    try:
        return json.loads(word) if word[:1] in "[{" else yaml.load(word, _Loader) if word else word
    except (ValueError, yaml.YAMLError):
        return word
