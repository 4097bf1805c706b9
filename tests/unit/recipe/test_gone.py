"""A key that went is refused with what to set instead; a run's resolved.toml that holds it at the default loads."""

import re

import pytest
import tomli_w

from shardbook.recipe import RecipeError, describe_keys, dump_recipe, load_recipe, note_gone
from shardbook.recipe.gone import GONE
from shardbook.run.eval.model import describe_rows, evaluation_recipe

MINE = "[model]\ninit = 'random'\n[train]\nsteps = 1\n"


def write_resolved(folder, name, value):
    """The resolved.toml of a run that began when the key `name` was there."""
    (folder / "mine.toml").write_text(MINE)
    section, _, key = name.partition(".")
    resolved = load_recipe(folder / "mine.toml").model_dump(mode="json")
    resolved[section][key] = value
    (folder / "resolved.toml").write_text(tomli_w.dumps(resolved))
    return folder / "resolved.toml"


def test_no_key_is_there_and_gone():
    assert not {name for name, _, _ in describe_keys()} & set(GONE)


@pytest.mark.parametrize("name", GONE)
def test_a_gone_key_is_refused_with_what_to_set_instead(name, tmp_path):
    default, way_out = GONE[name]
    section, _, key = name.partition(".")
    (tmp_path / "mine.toml").write_text(MINE)
    refused = re.escape(f"{name} = {default!r}: is not a key any more: {way_out}")
    with pytest.raises(RecipeError, match=refused) as error:
        load_recipe(tmp_path / "mine.toml", [f"{name}={tomli_w.dumps({'v': default})[4:].strip()}"])
    assert "\n" not in str(error.value)
    given = {"train": {"steps": 1}}
    given.setdefault(section, {})[key] = default
    (tmp_path / "its.toml").write_text(tomli_w.dumps(given))
    with pytest.raises(RecipeError, match=refused):
        load_recipe(tmp_path / "its.toml")


@pytest.mark.parametrize("name", GONE)
def test_a_resolved_recipe_that_holds_a_gone_key_loads_at_its_default_alone(name, tmp_path):
    default, _ = GONE[name]
    file = write_resolved(tmp_path, name, default)
    assert dump_recipe(load_recipe(file)) == dump_recipe(load_recipe(tmp_path / "mine.toml"))
    other = {str: "other", bool: not default, int: 7, float: 7.0}[type(default)]
    with pytest.raises(RecipeError, match=re.escape(f"{name} = {other!r}: is not a key any more")):
        load_recipe(write_resolved(tmp_path, name, other))


@pytest.mark.parametrize("name", GONE)
def test_of_a_past_run_only_weights_are_read_whatever_a_gone_key_was(name, tmp_path, capsys):
    default, _ = GONE[name]
    other = {str: "other", bool: not default, int: 7, float: 7.0}[type(default)]
    for value, said in ((default, ""), (other, f"resolved.toml: not heeded, as no key any more: {name} = {other!r}\n")):
        file = write_resolved(tmp_path, name, value)
        assert dump_recipe(load_recipe(file, is_past=True)) == dump_recipe(load_recipe(tmp_path / "mine.toml"))
        note_gone(file)
        out, err = capsys.readouterr()
        assert not out and err.endswith(said) and bool(err) == bool(said)


def test_an_evaluation_of_a_past_run_goes_on(tmp_path):
    write_resolved(tmp_path, "train.max_bad_steps", 3)
    recipe, run = evaluation_recipe(str(tmp_path), ["data=chitchat"])
    assert run == tmp_path and describe_rows(recipe, run).startswith("data.eval=chitchat, in place of none of the run")
    with pytest.raises(RecipeError, match=r"train.max_bad_steps = 3: is not a key any more"):
        evaluation_recipe(str(tmp_path), ["data=chitchat", "train.max_bad_steps=3"])
