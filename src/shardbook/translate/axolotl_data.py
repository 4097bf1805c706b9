"""axolotl's data sets: the sources of `datasets`, and the columns of their rows."""

from typing import Any

from shardbook.translate.rules import Refused, Result, Rule, Settings, is_on, words
from shardbook.translate.sources import columns_of, one_or_list, source_of

ROLES = {
    "user",
    "human",
    "assistant",
    "gpt",
    "system",
    "tool",
    "observation",
    "function_call",
    "model",
    "input",
    "output",
}


def held_out_of(datasets: Any, is_paired: bool) -> Rule:
    """Returns the rule of `test_datasets`, whose rows must be shaped as those of `datasets`."""

    def rule(value: Any) -> Result:
        settings, remark = datasets_of("data.eval", is_paired)(value)
        shape = {key: given for key, given in settings.items() if key != "data.eval"}
        trained, _ = datasets_of("data.train", is_paired)(datasets)
        if settings and shape != {key: given for key, given in trained.items() if key != "data.train"}:
            raise Refused("its rows have another shape than those of datasets: name them alike")
        return {key: given for key, given in settings.items() if key == "data.eval"}, remark

    return rule


def datasets_of(key: str, is_paired: bool = False) -> Rule:
    """Returns the rule of `datasets` or `test_datasets`: a list of sources, each with the shape of its rows, which are
    pairs or not."""

    def rule(value: Any) -> Result:
        settings: Settings = {}
        sources: list[str] = []
        remarks: list[str] = []
        trained = set()
        for row in value or []:
            of_row = _dataset(row, is_paired, sources, remarks)
            trained.add(of_row.get("data.train_on", "answers"))
            for name, given in of_row.items():
                if settings.setdefault(name, given) != given:
                    raise Refused(f"its data sets differ in {name}: {settings[name]} and {given}")
        if len(trained) > 1:
            raise Refused("data.train_on is one for all sources: train texts and conversations apart")
        return ({key: one_or_list(sources)} if sources else {}) | settings, "; ".join(dict.fromkeys(remarks))

    return rule


def pretrained_on(value: Any) -> Result:
    rows = [value] if isinstance(value, str | dict) else value or []
    return datasets_of("data.train")(
        [{"type": "pretrain"} | (row if isinstance(row, dict) else {"path": row}) for row in rows]
    )


OF_DATASET = set(
    words("""path name split type data_files ds_type field_messages message_property_mappings
message_field_role message_field_content roles roles_to_train train_on_eos chat_template conversation
field trust_remote_code field_system field_tools field_chosen field_rejected revision text_column""")
)
DRAWN_BY_TEMPLATE = "rows are written by the tokenizer's chat template, not in {}'s text"


def _dataset(row: dict[str, Any], is_paired: bool, sources: list[str], remarks: list[str]) -> Settings:
    """Returns the settings of one data set, and adds its sources and remarks. Raises Refused."""
    if other := [name for name, given in row.items() if name not in OF_DATASET and is_on(given)]:
        raise Refused(f"{', '.join(other)} of a data set: has no counterpart")
    if row.get("revision"):
        raise Refused("a revision of a data set has no counterpart: save it as a file")
    files = row.get("data_files")
    if files and "/" in str(row.get("path", "")) and not str(row["path"]).startswith((".", "/")):
        raise Refused(f"files inside of {row['path']} have no counterpart: name them in data.train")
    names = files if isinstance(files, list) else [files] if files else [row.get("path")]
    split = row.get("split")
    sources += [source_of(name, split, None if files else row.get("name")) for name in names]
    if is_on(row.get("chat_template")) or is_on(row.get("conversation")):
        remarks.append("the tokenizer's own chat template is used: where it has none, set data.chat_template")
    return _shape(row, is_paired, remarks)


def _shape(row: dict[str, Any], is_paired: bool, remarks: list[str]) -> Settings:
    kind = row.get("type")
    if isinstance(kind, dict):
        fields = {"system": "field_system", "instruction": "field_instruction", "input": "field_input"}
        fields |= {"output": "field_output", "prompt": "field_prompt", "chosen": "field_chosen"}
        fields |= {"rejected": "field_rejected"}
        remarks.append(DRAWN_BY_TEMPLATE.format("a format"))
        system = {"data.system": kind["system_prompt"]} if kind.get("system_prompt") else {}
        return columns_of({field: kind.get(name) for field, name in fields.items()}) | system
    base, _, variant = str(kind or "chat_template").partition(".")
    base, variant = base.partition(":")[0], variant.removeprefix("load_")
    if base in ("completion", "pretrain"):
        field = row.get("field") or row.get("text_column")
        remarks.append("texts longer than data.max_length are cut, not split into parts")
        return {"data.train_on": "all"} | columns_of({"text": field if field != "text" else None})
    if base.startswith("alpaca") and variant in ALPACA:
        remarks.append(DRAWN_BY_TEMPLATE.format("Alpaca"))
        return columns_of(ALPACA[variant])
    if base in ("chatml", "llama3") and variant in PAIRS:
        return columns_of(PAIRS[variant])
    if base not in ("chat_template", "sharegpt", "chatml", "llama3", "zephyr", "bradley_terry") or variant not in READ:
        raise Refused(f"rows of type {kind} are not read by that name; docs/data.md lists what is: set data.train")
    mapping = row.get("message_property_mappings") or {}
    role = row.get("message_field_role") or mapping.get("role", "role")
    content = row.get("message_field_content") or mapping.get("content", "content")
    if (role, content) not in (("role", "content"), ("from", "value")):
        raise Refused(f"messages of {role} and {content} are not read; role and content are, and from and value")
    if other := {word for many in (row.get("roles") or {}).values() for word in many} - ROLES:
        raise Refused(f"the role {sorted(other)[0]} is not read")
    if row.get("roles_to_train") not in (None, ["assistant"], ["gpt"], "assistant"):
        raise Refused(f"roles_to_train = {row['roles_to_train']}: answers are trained; data.train_on")
    if row.get("train_on_eos") not in (None, "turn"):
        raise Refused(f"train_on_eos = {row['train_on_eos']}: the end of each trained answer is trained")
    columns = {
        "chosen": row.get("field_chosen"),
        "rejected": row.get("field_rejected"),
        "system": row.get("field_system"),
    }
    field = row.get("field_messages") or row.get("field")
    if is_paired and role != "from" and variant in ("", "default"):
        columns["prompt"] = field or "messages"
    elif field not in (None, "messages", "conversations"):
        columns["conversations" if role == "from" else "messages"] = field
    return columns_of(columns | {"tools": row.get("field_tools")})


READ = ("", "default", "argilla", "argilla_chat", "ultra", "role", "multirole", "ultrachat")
ALPACA: dict[str, dict[str, str]] = {
    "": {},
    "qa": {"instruction": "question", "output": "answer"},
    "open_orca": {"instruction": "question", "output": "response", "system": "system_prompt"},
}
# of preferences whose answers are texts, in a conversation
PAIRS: dict[str, dict[str, str]] = {
    "intel": {"instruction": "question"},
    "icr": {"instruction": "input"},
    "prompt_pairs": {"instruction": "prompt"},
    "argilla": {"chosen": "chosen_response", "rejected": "rejected_response"},
}
