"""The layout reads from a trainer's file how ranks share the model: its parts for DeepSpeed and for FSDP."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardbook.recipe import first_line
from shardbook.translate.accelerate import RULES, fsdp_rules, named_file, sharded_by
from shardbook.translate.deepspeed import DEEPSPEED
from shardbook.translate.rules import STAGE, WRONG, Entry, File, Result, is_on, read_section
from shardbook.translate.trainer import LAYOUTS


def read_layout(
    file: File, program: str, launcher: Sequence[Entry], fsdp_alone: bool = False, is_laid_out: bool = False
) -> list[Entry]:
    """Returns the entries of a trainer's part for DeepSpeed (a file, or keys) and for FSDP. Where there is neither, and
    no entry of its `launcher` nor another of its keys (`is_laid_out`) says a stage, that is ddp.

    `fsdp_alone`: fsdp_config shards by itself, without `fsdp` beside it.
    """
    entries: list[Entry] = []
    if is_on(named := file.keys.get("deepspeed")):
        part = File(file.path, named) if isinstance(named, dict) else named_file(file, named, "deepspeed")
        entries += [part] if isinstance(part, Entry) else map(_of_deepspeed, DEEPSPEED.read(part, program))
    words_of_fsdp, section = file.keys.get("fsdp"), file.keys.get("fsdp_config")
    if is_on(words_of_fsdp) or (fsdp_alone and is_on(section)):
        entries += _read("fsdp", words_of_fsdp, sharded_by)
        if isinstance(section, dict):
            entries += read_section({"fsdp_config": section}, fsdp_rules("fsdp_config"))
            if fsdp_alone and not any(STAGE in entry.settings for entry in entries):
                entries.append(Entry("(fsdp_config)", None, {STAGE: "zero3"}, "shards parameters"))
        elif is_on(section):
            entries.append(Entry("fsdp_config", section, {}, "must be a section: keys and values", refused=True))
    if isinstance(axes := file.keys.get("parallelism_config"), dict):
        rules = {key: rule for key, rule in RULES.items() if key.startswith("parallelism_config.")}
        entries += read_section({"parallelism_config": axes}, rules)
    has_stage = is_laid_out or any(STAGE in entry.settings for entry in launcher)
    if not (has_stage or any(STAGE in entry.settings or entry.refused for entry in entries)):
        entries.append(Entry("(deepspeed, fsdp)", None, {STAGE: "ddp"}, f"neither is in the file: {program} runs DDP"))
    return entries


def without_layout(entries: list[Entry]) -> list[Entry]:
    """Returns the entries but those of keys that `read_layout` has read."""
    return [entry for entry in entries if entry.key not in LAYOUTS or not is_on(entry.value)]


def _of_deepspeed(entry: Entry) -> Entry:
    return entry if entry.key.startswith("(") else replace(entry, key=f"deepspeed: {entry.key}")


def _read(key: str, value: Any, rule: Callable[[Any], Result]) -> list[Entry]:
    try:
        return [Entry(key, value, *rule(value))]
    except WRONG as error:
        return [Entry(key, value, {}, first_line(error), refused=True)]
