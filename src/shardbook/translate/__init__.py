"""A recipe from another program's configuration, key by key, with an entry that tells the result of each key.

Reads DeepSpeed's JSON, accelerate's YAML, axolotl's and LLaMA-Factory's YAML, and TRL's arguments (YAML, or the command
in a shell script). Invariant: no key is dropped in silence (rules.py); a file of which nothing is known is refused.
"""

import sys
from pathlib import Path
from typing import Any

from shardbook.recipe import RecipeError, nearest, parse_recipe
from shardbook.translate.accelerate import ACCELERATE, launcher_keys
from shardbook.translate.arguments import TRANSFORMERS
from shardbook.translate.axolotl import AXOLOTL
from shardbook.translate.deepspeed import DEEPSPEED
from shardbook.translate.llama_factory import LLAMA_FACTORY
from shardbook.translate.reading import SHELL, VARIABLE, read_command, read_keys
from shardbook.translate.rules import NO_FILE, Entry, File, Program, Settings
from shardbook.translate.settle import settle
from shardbook.translate.trl import TRL, is_trl_script
from shardbook.translate.write import describe, write_recipe

# in the order in which they are asked: where two know as many of a file's keys, the first has it
PROGRAMS = (DEEPSPEED, ACCELERATE, TRANSFORMERS, AXOLOTL, LLAMA_FACTORY, TRL)
READS = f"translate reads {', '.join(program.name for program in PROGRAMS[:-1])} and {TRL.name}"
# what a file looks like that is none of them, by keys that only it has
LOOKS = {
    "a model's config.json": {"architectures", "hidden_size", "vocab_size"},
    "an adapter's adapter_config.json (lora.adapter is its directory)": {"peft_type"},
    "a tokenizer's configuration": {"tokenizer_class"},
    "a state of transformers' Trainer": {"log_history", "best_model_checkpoint"},
    "torchtune's": {"checkpointer", "metric_logger"},
    "ms-swift's": {"train_type", "tuner_type", "swift_version"},
    "NeMo's": {"exp_manager"},
    "verl's": {"actor_rollout_ref"},
    "Lightning's, NeMo's or verl's": {"trainer"},
    "a data set's dataset_info.json": {"hf_hub_url", "file_name"},
}


def translate_file(file: Path, out: Path | None, without_refused: bool) -> None:
    """Prints each key's result and writes the recipe. Raises RecipeError for refused keys, unless `without_refused`."""
    if out is not None and (out.exists() or out.suffix != ".toml" or not out.parent.is_dir()):
        why = "exists; name a new file" if out.exists() else "a recipe's file ends in .toml"
        raise RecipeError(f"--out {out}: {why if out.parent.is_dir() else 'no such directory'}")
    settings, entries = translate(file)
    print("\n".join(describe(entries)), file=sys.stderr)
    if (refused := [entry.key for entry in entries if entry.refused]) and not without_refused:
        count = f"{len(refused)} of its keys are refused: {', '.join(refused)}"
        raise RecipeError(f"{file}: {count}; --without-refused leaves them out")
    text = write_recipe(settings, entries, file.name)
    parse_recipe(text, str(file))
    if out is None:
        print(text, end="")
    else:
        try:
            out.write_text(text)
        except OSError as error:
            raise RecipeError(f"--out {out}: cannot be written ({error.strerror})") from None
        print(f"{file} -> {out}")


def translate(path: Path) -> tuple[Settings, list[Entry]]:
    """Returns a recipe's settings for another program's configuration at `path`, and an entry for each of its keys.

    Raises RecipeError where the file cannot be read, is of none of the programs, or trains by a method that a recipe
    has not. Refused keys are entries: the caller decides.
    """
    if path.suffix == ".toml":
        raise RecipeError(f"{path}: a .toml is a recipe already; {READS}")
    if path.suffix in SHELL:
        entries = _read_script(path)
    else:
        file = File(path, read_keys(path))
        program = find_program(file)
        entries = program.read(file)
    return settle(entries), entries


def find_program(file: File, of: tuple[Program, ...] = PROGRAMS) -> Program:
    """Returns the program that knows most of the file's keys. Raises RecipeError where none knows any."""
    for look, signs in LOOKS.items():
        if signs & file.keys.keys():
            raise RecipeError(f"{file.path}: looks like {look}; {READS}")
    if any(isinstance(value, dict) and "_component_" in value for value in file.keys.values()):
        raise RecipeError(f"{file.path}: looks like torchtune's; {READS}")
    known = {program: len(program.keys & file.keys.keys()) for program in of}
    best = max(known, key=lambda program: known[program])
    if not known[best]:
        names = [str(name) for name in file.keys]
        shown = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
        close = nearest(names[0], sorted({name for program in of for name in program.keys}))
        raise RecipeError(f"{file.path}: no key of it is known ({shown}){close}; {READS}")
    return best


def _read_script(path: Path) -> list[Entry]:
    """Returns the entries of the command in a shell script: its launcher's, then its arguments', which count more, with
    those in the files that both name. An argument that holds a variable counts as absent."""
    command = read_command(path)
    given = command.arguments | {f"--{name}": value for name, value in command.of_launcher.items()}
    unknown = {name: value for name, value in given.items() if VARIABLE.search(str(value))}
    keys = {name: value for name, value in command.arguments.items() if name not in unknown}
    if (named := keys.pop("config", None)) is not None:
        keys = read_keys(_find(File(path, {}), named, "--config")) | keys
    of_launcher = {name: value for name, value in command.of_launcher.items() if f"--{name}" not in unknown}
    file = File(path, keys)
    launcher = _read_launcher(file, command.launcher, of_launcher)
    program = _program_of(command.program) or find_program(file, (TRANSFORMERS, LLAMA_FACTORY, TRL, AXOLOTL))
    why = "holds a variable of the shell: write its value"
    refused = [Entry(name, value, {}, why, refused=True) for name, value in unknown.items()]
    return [*launcher, *program.read(file, command.program, launcher), *refused]


def _program_of(started: str) -> Program | None:
    """Returns the program that a command's name says, if one does."""
    commands = {"trl": TRL, "llamafactory-cli": LLAMA_FACTORY, "axolotl": AXOLOTL}
    return commands.get(started.partition(" ")[0]) or (TRL if is_trl_script(started) else None)


def _read_launcher(file: File, launcher: str, given: Settings) -> list[Entry]:
    """Returns the entries of a launcher's arguments, and of the YAML that `accelerate launch --config_file` names. A
    DeepSpeed JSON that these name becomes the program's own, which leaves to it what says auto."""
    if launcher != "accelerate":
        return [Entry(f"--{name}", value, {}) for name, value in given.items()]
    keys: dict[str, Any] = {}
    if (named := given.pop("config_file", None)) is not None:
        file_of_launcher = File(_find(file, named, "--config_file"), {})
        keys = read_keys(file_of_launcher.path)
    else:
        file_of_launcher = file
    for name, value in launcher_keys(given).items():
        keys[name] = (keys.get(name) or {}) | value if isinstance(value, dict) else value
    section = keys.get("deepspeed_config")
    if isinstance(section, dict) and (json_file := section.pop("deepspeed_config_file", None)):
        file.keys.setdefault("deepspeed", str(_find(file_of_launcher, json_file, "deepspeed_config_file")))
    return ACCELERATE.read(File(file.path, keys), launches=True) if keys else []


def _find(file: File, named: Any, what: str) -> Path:
    if not isinstance(named, str):
        raise RecipeError(f"{file.path}: {what} = {named!r}: must be a path")
    if (path := file.find(named)) is None:
        raise RecipeError(f"{file.path}: {what} {named}: {NO_FILE}")
    return path
