"""The writer prints a translation: a line for each key, in three lists, and the recipe."""

import json
from collections.abc import Iterable

from shardbook.recipe import Recipe
from shardbook.translate.rules import Entry, Settings

NOTHING = "nothing to set (off, the launcher's, or without an effect on a number)"


def describe(entries: Iterable[Entry]) -> list[str]:
    """Returns a line for each key that sets something or has a remark, one for all that need nothing, and one for each
    that is refused."""
    entries = list(entries)
    taken = [str(entry) for entry in entries if not entry.refused and (entry.settings or entry.remark)]
    quiet = [entry.key for entry in entries if not (entry.refused or entry.settings or entry.remark)]
    refused = [str(entry) for entry in entries if entry.refused]
    return taken + [f"{NOTHING}: {', '.join(quiet)}"] * bool(quiet) + refused


def write_recipe(settings: Settings, entries: list[Entry], source: str) -> str:
    """Returns the settings as a recipe in TOML, which loads; each line names the key that it is from."""
    origin = {key: entry.key for entry in entries for key in entry.settings}
    lines = [f"# Translated from {source}."]
    if missing := [key for key in ("model.path", "data.train") if key not in settings]:
        lines[0] += f" Not in it: set {' and '.join(missing)}."
        settings = settings | dict.fromkeys(missing, "")  # else a run would take Shardbook's defaults for them
    lines += [f"# {' '.join(str(entry).split())}" for entry in entries if entry.refused]
    sections = {"": {key: value for key, value in settings.items() if "." not in key}}
    for section in Recipe.model_fields:
        sections[section] = {
            key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{section}.")
        }
    for section, keys in sections.items():
        if keys:
            lines += ["", f"[{section}]"] if section else [""]
        for name, value in keys.items():
            asked_by = origin.get(f"{section}.{name}".lstrip("."), "not in the file")
            lines.append(f"{name} = {as_toml(value)}  # {' '.join(asked_by.split())}")
    return "\n".join(lines) + "\n"


def as_toml(value: object) -> str:
    """Returns a value as TOML, which writes text, numbers and lists as JSON does, and tables with an equals sign."""
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(name)} = {as_toml(one)}" for name, one in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value, ensure_ascii=False, default=str)
