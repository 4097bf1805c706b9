"""A recipe from a DeepSpeed JSON or an accelerate YAML, key by key, with an entry that tells the result of each key.

Invariant: no key is dropped in silence. Each sets something (with a remark where it differs), needs nothing here, or is
refused by name; a key without a rule is refused too. An absent key counts as given where the other program's default
differs from Shardbook's.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

import yaml

from shardbook.recipe import TIERS, Recipe, RecipeError, Train, first_line, nearest, parse_recipe
from shardbook.recipe.refusals import Conflict, conflicts, with_settings
from shardbook.translate.rules import ACCELERATE, AUTO, AXES, DEEPSPEED, STAGE, Refused, Rule, Settings

# settings that a run can do without, left out where a recipe refuses them -> the name of the key that asked
LEFT_OUT = {
    "parallel.backward_prefetch": "fsdp_backward_prefetch",
    "parallel.forward_prefetch": "fsdp_forward_prefetch",
    "offload.params": "(offload of parameters)",
}
OPEN = {"pipeline.stages": "no pipeline: set parallel.pp_size to the num_stages of the script's PipelineModule"}
LAUNCHERS = "the launcher's:"


@dataclass(frozen=True)
class Entry:
    """The result of one key: the settings that it makes, and a remark."""

    key: str
    value: Any
    settings: Settings
    said: str
    refused: bool = False

    def __str__(self) -> str:
        shown = json.dumps(self.value, default=str)
        became = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.settings.items())
        said = "REFUSED, " * self.refused + "; ".join(part for part in (became, self.said) if part)
        if self.value is None:  # a key that is not in the file, and still means something
            return f"{self.key}: {said}"
        return f"{self.key} = {shown if len(shown) <= 60 else shown[:57] + '...'}: {said}"


def describe(entries: list[Entry]) -> list[str]:
    """Returns a line for each entry, and one line for all entries that leave a key to the launcher."""
    left = [entry.key for entry in entries if entry.said.startswith(LAUNCHERS)]
    lines = [str(entry) for entry in entries if not entry.said.startswith(LAUNCHERS)]
    return lines + [f"{', '.join(left)}: {LAUNCHERS} keep them in its file or on its command line"] * bool(left)


def translate_file(file: Path, out: Path | None, without_refused: bool) -> None:
    """Prints each key's result and writes the recipe. Raises RecipeError for refused keys, unless `without_refused`."""
    settings, entries = translate(file)
    print("\n".join(describe(entries)), file=sys.stderr)
    if (refused := [entry.key for entry in entries if entry.refused]) and not without_refused:
        said = f"{len(refused)} of its keys have no counterpart: {', '.join(refused)}"
        raise RecipeError(f"{file}: {said}; --without-refused leaves them out")
    text = write_recipe(settings, entries, file.name)
    parse_recipe(text, str(file))
    if out is None:
        print(text, end="")
    elif out.exists():
        raise RecipeError(f"--out {out}: exists; name a new file")
    else:
        try:
            out.write_text(text)
        except OSError as error:
            raise RecipeError(f"--out {out}: cannot be written ({error.strerror})") from None
        print(f"{file} -> {out}")


def translate(path: Path) -> tuple[Settings, list[Entry]]:
    """Returns a recipe's settings for the DeepSpeed JSON or accelerate YAML at `path`, and an entry for each key.

    Raises RecipeError where the file cannot be read or is neither. Refused keys are entries: the caller decides.
    """
    whole = _read(path)
    is_deepspeed = path.suffix == ".json" and "distributed_type" not in whole
    entries = _entries(whole, DEEPSPEED if is_deepspeed else ACCELERATE)
    if not is_deepspeed and (named := _section(whole, "deepspeed_config").get("deepspeed_config_file")):
        if not isinstance(named, str):
            raise RecipeError(f"{path}: deepspeed_config.deepspeed_config_file = {named!r}: must be a path")
        inner = path.parent / named if (path.parent / named).is_file() else Path(named)
        entries = [entry for entry in entries if entry.key != "deepspeed_config.deepspeed_config_file"]
        inside = _read(inner)
        entries += [*_entries(inside, DEEPSPEED), *_assumed(inside)]
        whole = inside | whole  # for the checks of several keys together
    elif is_deepspeed:
        entries += _assumed(whole)
    entries.sort(key=lambda entry: entry.key == "scheduler")  # its rate is the one that DeepSpeed's steps have
    program = str(whole.get("distributed_type")).upper()
    if program == "DEEPSPEED":  # then accelerate ignores its data-parallel sizes
        for at, entry in enumerate(entries):
            if entry.key.startswith("parallelism_config.parallelism_config_dp_"):
                entries[at] = replace(entry, settings={}, said="nothing to set: ZeRO shards over all ranks")
    elif program == "MEGATRON_LM" and not any(entry.key.endswith("use_distributed_optimizer") for entry in entries):
        entries.append(Entry("(use_distributed_optimizer)", None, {STAGE: "ddp"}, "absent is false in accelerate"))
    for key in AXES:  # accelerate too refuses cp_size beside sp_size
        if sum(key in entry.settings for entry in entries) > 1:
            _refuse(entries, {key}, f"is {key} here, and so is another key of this file; set one of them to 1")
    if str(number := _section(whole, "zero_optimization").get("stage", 3)) != "3":
        switches = {"parallel.quantize_weights", "parallel.quantize_gradients", "parallel.secondary_shard"}
        said = f"goes with stage 3, not {number}; set zero_optimization.stage to 3, or leave it out"
        _refuse(entries, switches, said)
    batch = {"train.per_device_train_batch_size", "train.gradient_accumulation_steps"}
    is_whole = batch <= {key for entry in entries for key in entry.settings}
    for at, entry in enumerate(entries):
        if entry.key == "train_batch_size" and entry.value != "auto" and not is_whole:
            said = "is of all ranks: write train_micro_batch_size_per_gpu and gradient_accumulation_steps beside it"
            entries[at] = replace(entry, said=said, refused=True)
    settings: Settings = {}
    for entry in entries:
        for key, value in entry.settings.items():
            if key == STAGE and settings.get(STAGE) in ("zeropp", "hsdp") and value in ("zero3", "zeropp"):
                continue  # a switch has said more than the stage's number
            settings[key] = value
    return _settled(settings, entries, whole), entries


def _settled(settings: Settings, entries: list[Entry], whole: Settings) -> Settings:
    """Returns the settings after the checks of several keys together; adds an entry for each change."""

    def note(key: str, value: Any, changed: Settings, said: str, refused: bool = False) -> None:
        settings.update(changed)
        entries.append(Entry(key, value, changed, said, refused))

    settings.setdefault(STAGE, "zero3")
    stage = settings[STAGE]
    if stage == "hsdp" and "parallel.dp_shard_size" not in settings:
        ranks, machines = whole.get("num_processes"), whole.get("num_machines", 1)
        inside = prod(settings.get(axis, 1) for axis in AXES[:2])
        if all(type(count) is int and count > 0 for count in (ranks, machines)) and ranks % (machines * inside) == 0:
            shards = {"parallel.dp_shard_size": ranks // (machines * inside)}
            note("num_processes", ranks, shards, "hsdp shards inside a machine")
        else:
            said = "hsdp needs a whole number of shards on each machine: set parallel.dp_shard_size"
            instead = {} if "parallel.dp_replicate_size" in settings else {STAGE: "zero3"}
            note("num_processes / num_machines", f"{ranks} / {machines}", instead, said, refused=True)
    if stage == "zero3" and int(settings.get("parallel.dp_replicate_size", 1)) > 1:
        note("parallelism_config", None, {STAGE: "hsdp"}, "replicas of a sharded copy")
    for conflict in _conflicts(settings):
        for key in LEFT_OUT.keys() & set(conflict.keys):
            del settings[key]
            note(LEFT_OUT[key], None, {}, f"left out: {conflict.why}")
    params = settings.get("offload.params", "none")
    if TIERS.index(params) > TIERS.index(settings.get("offload.optimizer", "none")):
        note("(offload of parameters)", None, {"offload.optimizer": params}, "what they are made of goes with them")
    _settle(settings, entries)
    tier = settings.get("offload.optimizer", "none")
    if tier == "nvme" and "offload.path" not in settings:
        note("(nvme_path)", None, {}, "names no directory: set offload.path", refused=True)
    elif tier != "nvme" and settings.pop("offload.path", None):
        note("(nvme_path)", None, {}, "left out: nothing goes to a disk")
    if "train.steps" not in settings:
        said = "neither program's file says how long: set train.epochs or steps"
        note("(steps or epochs)", None, {"train.epochs": 1}, said)
    if settings.get("precision.params") == "bf16":
        note("(bf16)", None, {}, "on a CPU some 70 times slower than fp32: there set precision.params=fp32")
    return settings


def _conflicts(settings: Settings) -> list[Conflict]:
    return conflicts(with_settings(Recipe(train=Train(epochs=1)), settings))


def _refuse(entries: list[Entry], keys: set[str], said: str) -> None:
    """Makes each entry that sets one of `keys` a refused one, which sets nothing."""
    for at, entry in enumerate(entries):
        if keys & set(entry.settings):
            entries[at] = replace(entry, settings={}, said=said, refused=True)


def _settle(settings: Settings, entries: list[Entry]) -> None:
    """Refuses what a recipe refuses, in its words: sizes along tp, cp and pp, else the offload that contradicts
    them."""
    found = _conflicts(settings)
    for key in [key for key in AXES if key in settings]:
        if said := "; ".join(conflict.said for conflict in found if key in conflict.keys):
            _refuse(entries, {key}, said)
            del settings[key]
    if said := "; ".join(one.said for one in found if "offload.optimizer" in one.keys and not {*one.keys} & {*AXES}):
        for key in ("offload.optimizer", "offload.params", "offload.path"):
            settings.pop(key, None)
        entries.append(Entry("(offload)", None, {}, said, refused=True))


def _assumed(whole: Settings) -> list[Entry]:
    """Returns entries for absent keys whose default in DeepSpeed differs from Shardbook's."""
    absent = []
    if "gradient_clipping" not in whole:
        absent.append(Entry("(gradient_clipping)", None, {"optim.max_grad_norm": 0.0}, "absent is off in DeepSpeed"))
    if "stage" not in _section(whole, "zero_optimization"):
        absent.append(Entry("(zero_optimization.stage)", None, {STAGE: "ddp"}, "absent is stage 0 in DeepSpeed"))
    if not any(_section(whole, name).get("enabled") for name in ("bf16", "fp16")):
        absent.append(Entry("(bf16)", None, {"precision.params": "fp32"}, "absent or off is fp32 in DeepSpeed"))
    return absent


def _section(whole: Settings, name: str) -> Settings:
    found = whole.get(name)
    return found if isinstance(found, dict) else {}


def _entries(section: Settings, rules: dict[str, Rule], prefix: str = "") -> list[Entry]:
    found = []
    for name, value in section.items():
        key = f"{prefix}{name}"
        has_parts = any(rule.startswith(f"{key}.") for rule in rules)
        rule = rules.get(key) or rules.get(prefix.rstrip("."))
        try:
            if value == "auto" and rule and name in AUTO:
                found.append(Entry(key, value, rule(AUTO[name])[0], "auto: the default of transformers' Trainer"))
            elif value == "auto":
                found.append(Entry(key, value, {}, OPEN.get(key, "Shardbook's default")))
            elif has_parts and isinstance(value, dict):
                found += _entries(value, rules, f"{key}.") or [Entry(key, value, {}, "empty")]
            elif has_parts and key not in rules:
                raise Refused("must be a section: keys and values")
            elif rule is None:
                raise Refused(f"not a key that is known here{nearest(key, list(rules))}")
            else:
                found.append(Entry(key, value, *rule(value)))
        except Refused as error:
            found.append(Entry(key, value, {}, str(error), refused=True))
        except AttributeError:
            found.append(Entry(key, value, {}, "must be a section: keys and values", refused=True))
        except (TypeError, ValueError) as error:
            found.append(Entry(key, value, {}, f"not what this key takes ({first_line(error)})", refused=True))
    return found


def _once(pairs: list[tuple[Any, Any]]) -> Settings:
    if twice := [name for name, count in Counter(str(name) for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"{', '.join(twice)}: more than once")
    return dict(pairs)


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text}: not a finite number")
    return number


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _once([(key.value, None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Settings:
    try:
        text = path.read_text()
        if path.suffix == ".json":
            whole = json.loads(text, object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
        else:
            whole = yaml.load(text, _Loader)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark, what = error.problem_mark, " ".join(filter(None, (error.context, error.problem)))
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError(f"{path}: not YAML: {what}{where}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: not {'JSON' if path.suffix == '.json' else 'YAML'}: {first_line(error)}") from None
    if not isinstance(whole, dict) or not whole:
        raise RecipeError(f"{path}: must be DeepSpeed's JSON or accelerate's YAML: keys and values, at least one")
    return whole


def write_recipe(settings: Settings, entries: list[Entry], source: str) -> str:
    """Returns the settings as a recipe in TOML, which loads; each line names the key that it is from."""
    origin = {key: entry.key for entry in entries for key in entry.settings}
    lines = [f"# Translated from {source}. Model and data are not in it: set model.path and data.train."]
    lines += [f"# {' '.join(str(entry).split())}" for entry in entries if entry.refused]
    for section in Recipe.model_fields:
        here = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{section}.")}
        if here:
            lines += ["", f"[{section}]"]
        for name, value in here.items():
            asked_by = origin.get(f"{section}.{name}", "not in the file")
            # JSON writes such values as TOML does
            lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}  # {asked_by}")
    return "\n".join(lines) + "\n"
