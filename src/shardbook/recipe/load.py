"""Recipes as files: found by name, loaded with `section.key=value` overrides, written out, and explained when wrong."""

import difflib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shardbook.recipe.gone import describe_gone, drop_gone, explain_gone
from shardbook.recipe.schema import Recipe
from shardbook.recipe.sections import FORMS, NAMES, RecipeError, Section, nearest

NAMED = ("run.name", "run.project", "run.group")  # an override of one is text, whatever TOML would read: 1, nan, true


@cache
def other_words() -> dict[str, str]:
    """Returns the recipe key for each word that other programs use (words.toml)."""
    table = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
    return {word: key for key, words in table.items() for word in words}


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_recipe(path: str | Path, overrides: list[str] | None = None, is_past: bool = False) -> Recipe:
    """Returns the recipe in the TOML file `path`, with `section.key=value` overrides. `is_past`: of a run of which only
    weights or numbers are read, so that keys of its day may be left out. Raises RecipeError."""
    try:
        text = Path(path).read_text()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not TOML: {error}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_recipe(text, str(path), overrides, is_past)


def parse_recipe(text: str, source: str, overrides: list[str] | None = None, is_past: bool = False) -> Recipe:
    """Returns the recipe in `text`, TOML, as load_recipe does. Raises RecipeError, whose message begins with
    `source`."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{source}: not TOML: {error}") from None
    if Path(source).name == "resolved.toml":  # of a run, maybe of another version: it has every key of its day
        drop_gone(given, every=is_past)
    for word in overrides or []:
        _override(given, word)
    given.setdefault("train", {})
    try:
        return Recipe.model_validate(given)
    except ValidationError as error:
        errors: dict[str, list[str]] = {}  # pydantic's errors for each member of a union are joined to one
        for one in error.errors():
            what, should, rule = _explain(one).partition(": input should be ")
            errors.setdefault(what + should, []).append(rule)
        raise RecipeError(f"{source}: " + "; ".join(what + " or ".join(errors[what]) for what in errors)) from None


def note_gone(resolved: Path) -> None:
    """Prints which keys of a run's resolved.toml, loaded with `is_past`, are not heeded any more. Not on standard
    output, where a program may read JSON."""
    if words := describe_gone(tomllib.loads(resolved.read_text())):
        print(f"warning  {resolved}: {words}", file=sys.stderr, flush=True)


def dump_recipe(recipe: Recipe, with_defaults: bool = True) -> str:
    """Returns the recipe as TOML, with every default written out or none; loading it gives an equal recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_defaults=not with_defaults))


def flatten_recipe(recipe: Recipe) -> dict[str, Any]:
    """Returns every value of the recipe by its section.key."""
    values = recipe.model_dump(mode="json")
    method = {"method": values.pop("method")}  # the one key in no section
    return method | {f"{section}.{key}": value for section, inside in values.items() for key, value in inside.items()}


def resolve_precision(recipe: Recipe, device_type: str) -> Recipe:
    """Returns the recipe with `auto` replaced by its meaning on `device_type` (`cuda`, `cpu`)."""
    return recipe.model_copy(update={"precision": recipe.precision.on(device_type)})


def find_recipe(name: str) -> Path:
    """Returns the file of a recipe given by path or name (`smollm2-135m-fsdp`). Raises RecipeError with close names."""
    if Path(name).suffix == ".toml" and Path(name).is_file():
        return Path(name)
    known = list_recipes()
    if name in known:
        return known[name]
    if Path(name).is_dir():
        raise RecipeError(f"recipe {name!r}: is a folder; must be a .toml file, or the name of a shipped recipe")
    close = difflib.get_close_matches(Path(name).stem, known, n=3, cutoff=0.4)
    choices = f"close to it: {', '.join(close)}" if close else f"there are: {', '.join(known)}"
    raise RecipeError(f"recipe {name!r}: no such file or name; {choices}")


def list_recipes() -> dict[str, Path]:
    """Returns the shipped recipes by name: from ./recipes, else from the source tree or the installed package."""
    package = Path(__file__).parents[1]
    for folder in (Path("recipes"), package.parents[1] / "recipes", package / "recipes"):
        if files := sorted(folder.glob("*.toml"), key=lambda file: file.stem):
            return {file.stem: file for file in files}
    return {}


def describe_keys() -> list[tuple[str, str, str]]:
    """Returns `(section.key, default, help)` of every key of the schema, in order."""
    method = ("method", "sft", Recipe.model_fields["method"].description or "")
    return [method, *((key, str(field.default), field.description or "") for key, field in _fields())]


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yields the name, section.key, and the field of every key that is in a section, in order."""
    for section, section_field in Recipe.model_fields.items():
        if isinstance(section_field.annotation, type) and issubclass(section_field.annotation, Section):
            for name, field in section_field.annotation.model_fields.items():
                yield f"{section}.{name}", field


def _override(given: dict[str, Any], word: str) -> None:
    name, equals, text = word.partition("=")
    if not equals or not name.strip():
        raise RecipeError(f"override {word!r}: must look like section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # bare strings: run.name=first and data.train=[mine/a.jsonl,b.jsonl] need no quotes in a shell
        item = r"[^\s,\[\]{}\"']+"
        is_list = re.fullmatch(rf"\[\s*{item}(\s*,\s*{item})*\s*\]", text)
        value = re.findall(item, text) if is_list else text
    *sections, last = name.strip().split(".")
    if name.strip() in NAMED and not isinstance(value, str | list | dict):
        value = text
    table = given
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise RecipeError(f"override {word!r}: {section} is a key, not a section")
    for _, field in _fields():  # a key of two names: else the file's name for it would compete with the override's
        if last in (names := getattr(field.validation_alias, "choices", ())):
            for other in names:
                table.pop(other, None)
    if sections == ["train"] and last in ("steps", "epochs") and value:  # the later one says how long a run is
        table.pop("epochs" if last == "steps" else "steps", None)
    table[last] = value


def _explain(error: Any) -> str:
    """Returns one pydantic error as our line: the key, the value, what is allowed, the nearest spelling."""
    # pydantic adds the tried member of a union (`int`, `list[str]`) to the path: keep only the recipe's own names
    path = [
        str(part)
        for part in error["loc"]
        if not str(part).startswith(("constrained-", "list[", "literal["))
        and part not in ("int", "float", "str", "bool")
    ]
    inside = error["input"]
    while error["type"] == "extra_forbidden" and isinstance(inside, dict) and inside:  # a section: name its first key
        key, inside = next(iter(inside.items()))
        path.append(key)
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        if gone := explain_gone(name):
            return f"{name} = {inside!r}: {gone}"
        if known_as := other_words().get(path[-1].lower()):
            return f"{name} is not a key of a recipe; here it is {known_as}"
        every = [row[0] for row in describe_keys()] + list(Recipe.model_fields)
        if elsewhere := [row for row in every if row.rpartition(".")[2] == path[-1] and row != path[-1]]:
            return f"{name} is not a key of a recipe; did you mean {' or '.join(elsewhere)}?"
        leaves = [row.rpartition(".")[2] for row in every if row.startswith(f"{path[0]}.")]
        if len(path) == 1 or not leaves:
            return (
                f"{name} is not a key of a recipe{nearest(name, every) or nearest(path[0], list(Recipe.model_fields))}"
            )
        close = difflib.get_close_matches(path[1], leaves, n=1)
        hint = f"did you mean {path[0]}.{close[0]}?" if close else f"{path[0]} has {', '.join(leaves)}"
        return f"{name} is not a key of a recipe; {hint}"
    if error["type"] == "value_error":
        return f"{name}: ".removeprefix(": ") + error["msg"].removeprefix("Value error, ")
    hint = ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        hint = nearest(error["input"], error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
    message = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "bool_type":
        message = f"{'input should' if 'bool' in error['loc'] else 'must'} be true or false"  # the first: in a union
    if error["type"] == "model_type":
        message = f"is a section; set a key of it, {name}.<key>"
    if error.get("ctx", {}).get("pattern") == NAMES:
        message = (
            "must be at most 100 letters, digits, '_', '.', '-', the first none of the last two (run.dir may have /)"
        )
    if forms := FORMS.get(error.get("ctx", {}).get("pattern", "")):
        message = f"must be one of {', '.join(forms)}"
        heads = [form.split(":")[0] for form in forms]
        hint = "" if (head := error["input"].split(":")[0]) in heads else nearest(head, heads)
    return f"{name} = {error['input']!r}: {message}{hint}"
