"""Shell completion: commands, options, recipes and keys, with the values of those that have few.

Invariant: nothing is listed by hand. The shells' own code is in the files beside this one.
"""

import argparse
import re
from pathlib import Path
from typing import Any, get_args

from shardbook.gpus import GPUS
from shardbook.recipe import STAGES, Recipe, describe_keys, list_recipes

# of a function that prints a list of words: its beginning, the case of one argument, its end
POSIX = "_shardbook_{}() {{\n    case $1 in\n", "    '{}') echo '{}' ;;\n", "    esac\n}\n"
FISH = (
    'function _shardbook_{}\n    switch "$argv[1]"\n',
    "    case '{}'\n        string split ' ' -- '{}'\n",
    "    end\nend\n",
)


def print_completion(shell: str, commands: dict[str, argparse.ArgumentParser]) -> int:
    """Prints the script that completes `shardbook` in `shell` (`bash`, `zsh`, `fish`)."""
    recipes, keys = list(list_recipes()), [name for name, _, _ in describe_keys()]
    words = {"": [*commands, "--help", "--version"]}
    values = {"--of": recipes, "--gpu": [name for name, gpu in GPUS.items() if gpu.gb]}
    for section, field in Recipe.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {"": field})
        values |= {f"{section}.{name}".rstrip("."): _choices(each.annotation) for name, each in inner.items()}
    values["parallel.stage"] = [*STAGES, "fsdp"]
    for name, command in commands.items():
        usage = " ".join(command.format_usage().split())
        choices = {flag: given.split(",") for flag, given in re.findall(r"([\w-]+)\]? {(.*?)}", usage)}
        words[name] = [*re.findall(r"--[\w-]+", usage), *choices.pop("-h", [])]
        values |= choices
        words[name] += recipes if re.search(r"[ \[]recipe\b", usage) else []
        words[name] += [f"{key}=" for key in keys] if "key=value" in usage else []
    frame = Path(__file__).with_name(f"completion.{shell}").read_text()
    print(frame.replace("@tables@", _function(shell, "words", words) + _function(shell, "values", values).rstrip()))
    return 0


def _choices(annotation: Any) -> list[str]:
    """Returns the words that a value of this type can be, where they can be listed."""
    if annotation is bool:
        return ["true", "false"]
    parts = get_args(annotation)
    return [each for part in parts for each in ([part] if isinstance(part, str) else _choices(part))]


def _function(shell: str, name: str, table: dict[str, list[str]]) -> str:
    """Returns the shell's function `_shardbook_<name>`, which prints the words that `table` has for its argument."""
    begin, form, end = FISH if shell == "fish" else POSIX
    cases = (form.format(given, " ".join(values)) for given, values in table.items() if values)
    return begin.format(name) + "".join(cases) + end
