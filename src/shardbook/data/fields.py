"""Fields: which fields of a row are read. Knows what each format reads, and nothing of what is in them.

Invariant: no field that holds something is left out unsaid. What would be lost to training (images, a second format,
a verdict on the answer) is an error; other fields (ids, scores) are named.
"""

from collections.abc import Collection
from typing import Any

from shardbook.data.formats import FORMATS, RawRow
from shardbook.recipe import RecipeError

MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
PROMPTS = {"prompt": ["prompt"], "conversations": ["conversations"], "instruction": ["instruction", "input", "history"]}
MORE = {"instruction and output": ["input", "history"]}  # fields of a format that need not be there
EVERYWHERE = ["system", "tools"]
_FORMAT_FIELDS = [*dict.fromkeys(field for fields in FORMATS.values() for field in fields)]
# what says that an answer is bad, in rows that have one answer each
VERDICTS = {"label", "is_chosen", "preferred"}


def read_fields(row: RawRow, where: str, is_pair: bool, columns: Collection[str] = ()) -> tuple[RawRow, list[str]]:
    """Returns the row, without the fields of formats that `columns` does not choose, and the names of its fields that
    hold something and are not read. `columns`: the fields that the recipe's data.columns names. Raises RecipeError."""
    if media := [
        name for name, value in row.items() if name.lower() in MEDIA and holds(value) and value not in (0, False)
    ]:
        raise RecipeError(f"{where}: has {media[0]}, and only text is trained; leave the field out, or the row")
    formats = _pair_formats(row) if is_pair else _formats(row)
    # an empty field of a format that is not the row's is none: else it would be read for the other
    dropped = {name for name in _FORMAT_FIELDS if name in row and not holds(row[name])}
    if is_pair and isinstance(row.get("chosen"), list) and not holds(row.get("prompt")):
        formats.pop("prompt", None)  # a blank one is none: the messages begin with it
    if len(formats) > 1 and (named := {name: fields for name, fields in formats.items() if {*fields} & {*columns}}):
        dropped |= {name for fields in formats.values() for name in fields}
        formats = named
    if len(formats) > 1:
        raise RecipeError(f"{where}: {_two(list(formats), is_pair)}")
    read = {name for fields in formats.values() for name in fields}
    if formats and not is_pair and "text" not in read and not read & {*columns}:
        _check_verdict(row, where)
    dropped = dropped - read if read or is_pair else set()
    read.update(EVERYWHERE, ("chosen", "rejected") if is_pair else ())
    left = [name for name, value in row.items() if name not in read and holds(value)]
    return {name: value for name, value in row.items() if name not in dropped} if dropped else row, left


def holds(value: Any) -> bool:
    """Returns whether a value is something: not null, nor a blank text, nor a list or a table of nothing else."""
    if isinstance(value, list | dict):
        return any(map(holds, value if isinstance(value, list) else value.values()))
    return bool(value.strip()) if isinstance(value, str) else value is not None


def _formats(row: RawRow) -> dict[str, list[str]]:
    """Returns the formats whose fields a row has, with all fields that each reads; a pair is one too."""
    formats = {}
    for name, needed in FORMATS.items():
        kinds = {type(row.get(field)) for field in needed}
        allowed: list[set[type]] = [{list}] if name in ("messages", "conversations") else [{str}]
        if name == "prompt and completion":
            allowed = [{str}, {list}]
        if kinds in allowed and holds(row[needed[-1]]):
            formats[name] = [*needed, *MORE.get(name, ())]
    if formats and holds(row.get("chosen")) and holds(row.get("rejected")):
        formats["chosen and rejected"] = ["chosen", "rejected"]
    return formats


def _pair_formats(row: RawRow) -> dict[str, list[str]]:
    """Returns the prompts that a pair has, with the fields that each is read from; of conversations that also are a
    whole chat (messages) the pair says nothing."""
    prompts = {name: fields for name, fields in PROMPTS.items() if isinstance(row.get(name), (str, list))}
    return {name: fields for name, fields in prompts.items() if holds(row[name])} or {"prompt": ["prompt"]}


def _two(names: list[str], is_pair: bool) -> str:
    field = FORMATS.get(names[0], names)[-1]
    choose = f'say which is meant, as data.columns={{{field} = "{field}"}}, or leave the other out'
    if is_pair:
        return f"has {names[0]} and {names[1]}, and each can be the prompt: {choose}"
    more = ". Preferences are trained by method = dpo, orpo, simpo and reward" if "rejected" in names[-1] else ""
    return f"has {names[0]}, and {names[1]} too, and a row is one of them: {choose}{more}"


def _check_verdict(row: RawRow, where: str) -> None:
    if verdicts := [name for name, value in row.items() if name.lower() in VERDICTS and isinstance(value, bool)]:
        name = verdicts[0]
        verdict = f"has {name} = {str(row[name]).lower()}, a verdict on its answer, and every answer is trained"
        raise RecipeError(f"{where}: {verdict}; leave the bad ones out, and the field")
