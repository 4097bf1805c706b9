"""A recipe from another program's configuration, key by key, with an entry that tells the result of each key.

Reads DeepSpeed's JSON, accelerate's YAML, axolotl's and LLaMA-Factory's YAML, and TRL's arguments (YAML, or the command
in a shell script). Invariant: no key is dropped in silence (rules.py); a file of which nothing is known is refused.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardbook.recipe import RecipeError, nearest, parse_recipe
from shardbook.translate.accelerate import ACCELERATE, launcher_keys
from shardbook.translate.arguments import TRANSFORMERS
from shardbook.translate.axolotl import AXOLOTL
from shardbook.translate.deepspeed import DEEPSPEED
from shardbook.translate.llama_factory import LLAMA_FACTORY
from shardbook.translate.reading import SHELL, VARIABLE, Command, read_command, read_keys
from shardbook.translate.rules import STAGE, Entry, File, Program, Settings
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
    those in the files that both name."""
    command = read_command(path)
    keys = dict(command.arguments)
    if isinstance(named := keys.pop("config", None), str):
        keys = read_keys(_find(File(path, {}), named, "--config")) | keys
    file = File(path, keys)
    launcher = _read_launcher(file, command)
    program = _program_of(command.program) or find_program(file, (TRANSFORMERS, LLAMA_FACTORY, TRL, AXOLOTL))
    entries = [*launcher, *program.read(file, command.program, any(STAGE in entry.settings for entry in launcher))]
    for at, entry in enumerate(entries):
        if (entry.settings or entry.remark) and VARIABLE.search(str(entry.value)):
            why = "holds a variable of the shell: write its value"
            entries[at] = replace(entry, settings={}, remark=why, refused=True)
    return entries


def _program_of(started: str) -> Program | None:
    """Returns the program that a command's name says, if one does."""
    commands = {"trl": TRL, "llamafactory-cli": LLAMA_FACTORY, "axolotl": AXOLOTL}
    return commands.get(started.partition(" ")[0]) or (TRL if is_trl_script(started) else None)


def _read_launcher(file: File, command: Command) -> list[Entry]:
    """Returns the entries of a launcher's arguments, and of the YAML that `accelerate launch --config_file` names."""
    given = dict(command.of_launcher)
    if command.launcher != "accelerate":
        return [Entry(f"--{name}", value, {}) for name, value in given.items()]
    keys: dict[str, Any] = {}
    if isinstance(named := given.pop("config_file", None), str):
        keys = read_keys(_find(file, named, "--config_file"))
    for name, value in launcher_keys(given).items():
        keys[name] = keys.get(name, {}) | value if isinstance(value, dict) else value
    return ACCELERATE.read(File(file.path, keys)) if keys else []


def _find(file: File, named: str, what: str) -> Path:
    if (path := file.find(named)) is None:
        why = "no such file; one of that name beside this one is read too"
        raise RecipeError(f"{file.path}: {what} {named}: {why}")
    return path
