"""The checks of several keys together: what the settings of one key make of another's, and what a recipe refuses."""

import re
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from shardbook.recipe import TIERS, Recipe, Train
from shardbook.recipe.refusals import Conflict, conflicts, with_settings
from shardbook.translate.accelerate import UNEVEN
from shardbook.translate.rules import ACCUMULATION, AXES, BATCH, STAGE, Entry, Settings

# settings that a run can do without, left out where a recipe refuses them -> the name of the key that asked
LEFT_OUT = {
    "parallel.backward_prefetch": "fsdp_backward_prefetch",
    "parallel.forward_prefetch": "fsdp_forward_prefetch",
    "offload.params": "(offload of parameters)",
}


def join(entries: list[Entry]) -> Settings:
    """Returns the settings of all entries, the last word on each; refuses axes that two keys set."""
    for key in AXES:  # accelerate too refuses cp_size beside sp_size
        if sum(key in entry.settings for entry in entries) > 1:
            refuse({}, entries, {key}, f"is {key} here, and so is another key of this file; set one of them to 1")
    settings: Settings = {}
    setters: dict[str, int] = {}  # key of a recipe -> the number of the entry that sets it
    for number, entry in enumerate(entries):
        for key, value in entry.settings.items():
            if key == STAGE and settings.get(STAGE) in ("zeropp", "hsdp") and value in ("zero3", "zeropp"):
                continue  # a switch has said more than the stage's number
            if key in setters and settings[key] != value and key != STAGE:
                _give_way(entries, setters[key], key, entry.key)
            settings[key], setters[key] = value, number
    return settings


def _give_way(entries: list[Entry], number: int, key: str, to: str) -> None:
    """Takes a setting from an entry, whose line then tells which key sets another value."""
    entry = entries[number]
    left = {name: value for name, value in entry.settings.items() if name != key}
    entries[number] = replace(entry, settings=left, remark=f"{key} is set by {to}")


def settle(entries: list[Entry]) -> Settings:
    """Returns a recipe's settings, in which nothing contradicts; adds an entry for each change."""
    refuse_values(entries)
    settings = join(entries)

    def note(key: str, value: Any, changed: Settings, remark: str, refused: bool = False) -> None:
        settings.update(changed)
        entries.append(Entry(key, value, changed, remark, refused))

    _check_batch(settings, entries)
    settings.setdefault(STAGE, "zero3")
    if settings[STAGE] == "hsdp" and not {"parallel.dp_shard_size", "parallel.dp_replicate_size"} & settings.keys():
        settings[STAGE] = "zero3"
        if not any(entry.key == UNEVEN for entry in entries):
            why = "hybrid shard needs the ranks that share a copy: set parallel.stage=hsdp and parallel.dp_shard_size"
            note("(hybrid shard)", None, {}, why, refused=True)
    if settings[STAGE] == "zero3" and int(settings.get("parallel.dp_replicate_size", 1)) > 1:
        note("(dp_replicate_size)", None, {STAGE: "hsdp"}, "replicas of a sharded copy")
    for conflict in _conflicts(settings):
        for key in LEFT_OUT.keys() & set(conflict.keys):
            if settings.pop(key, None) is not None:
                note(LEFT_OUT[key], None, {}, f"left out: {conflict.why}")
    params = settings.get("offload.params", "none")
    if TIERS.index(params) > TIERS.index(settings.get("offload.optimizer", "none")):
        note("(offload of parameters)", None, {"offload.optimizer": params}, "what they are made of goes with them")
    drop_refused(settings, entries)
    tier = settings.get("offload.optimizer", "none")
    if tier == "nvme" and "offload.path" not in settings:
        note("(nvme_path)", None, {}, "names no directory: set offload.path", refused=True)
    elif tier != "nvme" and settings.pop("offload.path", None):
        note("(nvme_path)", None, {}, "left out: nothing goes to a disk")
    if settings.get("train.eval_steps") and not (settings.get("data.eval") or settings.get("data.eval_size")):
        del settings["train.eval_steps"]
        note("(eval_steps)", None, {}, "left out: no held-out rows are named; set data.eval or data.eval_size")
    if settings.get("train.steps"):
        settings.pop("train.epochs", None)
    refuse_sections(settings, entries)
    if not {"train.steps", "train.epochs"} & settings.keys():
        note(
            "(steps or epochs)", None, {"train.epochs": 1}, "the file does not say how long: set train.epochs or steps"
        )
    refuse_conflicts(settings, entries)
    if settings.get("precision.params") == "bf16":
        note("(bf16)", None, {}, "on a CPU some 70 times slower than fp32: there set precision.params=fp32")
    return settings


def _check_batch(settings: Settings, entries: list[Entry]) -> None:
    """Refuses train_batch_size, which is of all ranks, where the two keys that it follows from are not beside it; else
    tells for how many ranks it is true."""
    for at, entry in enumerate(entries):
        if entry.key in ("train_batch_size", "deepspeed: train_batch_size") and type(entry.value) is int:
            if entry.key != "train_batch_size":
                settings.setdefault(ACCUMULATION, 1)  # of a trainer that does not say it
            if not {BATCH, ACCUMULATION} <= settings.keys():
                why = "is of all ranks: write train_micro_batch_size_per_gpu and gradient_accumulation_steps beside it"
                entries[at] = replace(entry, remark=why, refused=True)
                continue
            rows, accumulation = settings[BATCH], settings[ACCUMULATION]
            ranks, rest = divmod(entry.value, max(rows * accumulation, 1))
            shown = f"{entry.value} = {rows} x {accumulation} x {ranks} ranks: other ranks step with other rows"
            if rest or not ranks:
                shown = f"{entry.value} is no whole number of ranks with {rows} x {accumulation} rows"
            entries[at] = replace(entry, remark=shown, refused=bool(rest or not ranks))


def _conflicts(settings: Settings) -> list[Conflict]:
    return conflicts(with_settings(Recipe(train=Train(epochs=1)), settings))


def refuse(settings: Settings, entries: list[Entry], keys: set[str], why: str) -> None:
    """Makes each entry that sets one of `keys` a refused one. What it sets, and no other entry does, is taken from
    `settings`."""
    gone = set(keys)
    for at, entry in enumerate(entries):
        if keys & set(entry.settings):
            gone |= entry.settings.keys()
            entries[at] = replace(entry, settings={}, remark=why, refused=True)
    for key in gone - {key for entry in entries for key in entry.settings}:
        settings.pop(key, None)


def drop_refused(settings: Settings, entries: list[Entry]) -> None:
    """Refuses what a recipe refuses, in its words: sizes along tp, cp and pp, and the offload of an optimizer."""
    against = _conflicts(settings)
    for key in [key for key in AXES if key in settings]:
        if why := "; ".join(conflict.text for conflict in against if key in conflict.keys):
            refuse(settings, entries, {key}, why)
    if why := "; ".join(conflict.text for conflict in against if "offload.optimizer" in conflict.keys):
        refuse(settings, entries, {"offload.optimizer", "offload.params", "offload.path"}, why)


def refuse_values(entries: list[Entry]) -> None:
    """Refuses each entry that sets a key to what a recipe cannot have, in the recipe's words."""
    for at, entry in enumerate(entries):
        for key, value in entry.settings.items():
            if why := _refusal(key, value):
                entries[at] = replace(entry, settings={}, remark=f"{key}: {why}", refused=True)


def _refusal(key: str, value: Any) -> str:
    """Returns why a recipe cannot have `value` at `key`, empty where it can: what contradicts another key is no reason
    yet."""
    section, _, name = key.rpartition(".")
    try:
        Recipe.model_validate({"train": {"epochs": 1}} | ({section: {name: value}} if section else {name: value}))
    except ValidationError as error:
        place = tuple(key.split("."))
        return next((one["msg"].lower() for one in error.errors() if one["loc"][: len(place)] == place), "")
    return ""


def refuse_sections(settings: Settings, entries: list[Entry]) -> None:
    """Refuses what a section of a recipe refuses by itself, until none does: the setting that its error names first."""
    plain = Recipe(train=Train(epochs=1))
    while True:
        sections: dict[str, Any] = {"train": {} if {"train.steps", "train.epochs"} & settings.keys() else {"epochs": 1}}
        for key, value in settings.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, {})[name] = value
        wrong = []
        for section, keys in sections.items():
            if section:
                try:
                    type(getattr(plain, section)).model_validate(keys)
                except ValidationError as error:
                    text = error.errors()[0]["msg"].removeprefix("Value error, ")
                    named = ((re.search(rf"\b{name}\b", text), f"{section}.{name}") for name in keys)
                    wrong += [(match.start(), key, text) for match, key in named if match]
        if not wrong:
            return
        _, key, why = min(wrong)
        refuse(settings, entries, {key}, why)


def refuse_conflicts(settings: Settings, entries: list[Entry]) -> None:
    """Refuses what contradicts in the end, until nothing does: of two keys the one that is named first."""
    while keys := [
        (key, conflict.text)
        for conflict in _conflicts(settings)
        for key in conflict.keys
        if key in settings and key not in ("method", STAGE)
    ]:
        key, why = keys[0]
        refuse(settings, entries, {key}, why)
