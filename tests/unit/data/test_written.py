"""Whether a template writes all of a conversation: families that do, and each way of losing a part of it."""

import json
import re
from datetime import datetime

import numpy as np
import pytest
from templates import PLAIN, TEMPLATES, TOOLS
from tiny import CHATML, encode_row, tokenizer, trained_text

from shardbook.data.chat import Encoder
from shardbook.data.formats import read_row
from shardbook.recipe import RecipeError

SYSTEM = {"role": "system", "content": "Be kind."}
USER, MORE = {"role": "user", "content": "Hi there"}, {"role": "user", "content": "And what else?"}
ANSWER, LAST = {"role": "assistant", "content": "It is ünï 🙂."}, {"role": "assistant", "content": "a\n\nb"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "the place"}, "far": {"type": "number"}},
            "required": ["at"],
        },
    },
}


def call(number: int, name: str = "look", **arguments) -> dict:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


CALLING = {
    "tools": [TOOL],
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call(0, at='a "sky"\n', far=0.7), call(1, at="sea", far=0)],
        },
        {"role": "tool", "tool_call_id": "call00000", "content": "blue"},
        {"role": "tool", "tool_call_id": "call00001", "content": '{"is": "green"}'},
        ANSWER,
    ],
}


# ---- families: ids are the template's, masks are those of another computation


def expected(coder, messages: list, tools: list | None = None) -> tuple[list[int], list[bool]]:
    """Returns ids and mask by transformers alone: an answer lies behind the text that a generation prompt ends with,
    up to the end of the text without white space of the conversation that ends with it."""
    text = coder.apply_chat_template(messages, tools=tools, tokenize=False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            how = {"tools": tools, "tokenize": False}
            before = coder.apply_chat_template(messages[:number], add_generation_prompt=True, **how)
            until = coder.apply_chat_template(messages[: number + 1], **how).rstrip()
            until = until if text.startswith(until) else until.removesuffix("<|endoftext|>").rstrip()
            assert text.startswith(before) and text.startswith(until)
            spans.append((len(before), len(until)))
    tokens = coder(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in tokens["offset_mapping"]]
    return tokens["input_ids"], [any(begin <= start < end for begin, end in spans) for start in starts]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("first", [[], [SYSTEM]])
def test_masks_of_twenty_templates(name, first):
    coder, messages = tokenizer(TEMPLATES[name]), [*first, USER, ANSWER, MORE, LAST]
    ids, mask = encode_row({"messages": messages}, coder, "row 7")
    known_ids, known_mask = expected(coder, messages)
    if name == "Phi 3":  # its end of sequence stands after the last answer alone, and belongs to no turn
        known_mask[-2:] = [False, False]
    assert ids == known_ids and mask == known_mask and any(mask)


@pytest.mark.parametrize("name", TOOLS)
def test_masks_of_tools(name):
    coder = tokenizer(TOOLS[name])
    for row in (CALLING, {**CALLING, "messages": [SYSTEM, *CALLING["messages"]]}):
        ids, mask = encode_row(row, coder, "row 7")
        assert (ids, mask) == expected(coder, row["messages"], row["tools"])


@pytest.mark.parametrize("name", PLAIN)
def test_a_template_without_tools_refuses_them(name):
    with pytest.raises(RecipeError, match=r"row 7: the chat template (does not write the tool look|refuses)"):
        encode_row({"messages": [USER, ANSWER], "tools": [TOOL]}, tokenizer(PLAIN[name]), "row 7")


# ---- each way to lose something. The words that are lost stand elsewhere too: that a word is there proves nothing


QWEN, HERMES, FUNCTIONS = TOOLS["Qwen 2.5"], TOOLS["Hermes"], TOOLS["Functions"]
WORDY = {"role": "user", "content": "look Looks up. at far the place blue sky sea 0.7 {} Be kind. green"}


def replaced(template: str, old: str, new: str) -> str:
    assert old in template
    return template.replace(old, new)


ONLY_ROLES = "{{ m.content }}", "{{ m.content if m.role in ('user', 'assistant') }}"
LOSSES = {
    "system": (HERMES, *ONLY_ROLES, "message 1 (system)"),
    "the second of two systems": (
        HERMES,
        "{{ m.content }}",
        "{{ m.content if m.role != 'system' or loop.first }}",
        "message 1 (system)",
    ),
    "results of tools": (QWEN, "<tool_response>{{ m.content }}", "<tool_response>", "message 3 (tool)"),
    "all but the first call": (
        QWEN,
        "in m.tool_calls %}",
        "in (m.tool_calls or [])[:1] %}",
        "the call of look in message 2",
    ),
    "calls of earlier turns": (
        QWEN,
        "in m.tool_calls %}",
        "in m.tool_calls if m == messages[-1] %}",
        "the call of look in message 2",
    ),
    "arguments": (QWEN, "call.function | tojson", "call.function.name", "the argument at in the call of look"),
    "values of arguments": (
        QWEN,
        "call.function | tojson",
        "[call.function.name, call.function.arguments | list] | tojson",
        "the argument at in the call of look in message 2",
    ),
    "arguments that are zero": (
        QWEN,
        "{{ call.function | tojson }}",
        "{{ call.function.name }}{% for n, v in call.function.arguments.items() if v %}{{ n }}={{ v }}{% endfor %}",
        "the argument far in the call of look in message 2",
    ),
    "digits of arguments": (
        QWEN,
        "{{ call.function | tojson }}",
        "{{ call.function.name }}{% for n, v in call.function.arguments.items() %}{{ n }}="
        "{{ v | round | int if v is number else v }}{% endfor %}",
        "the argument far in the call of look in message 2",
    ),
    "tools": (QWEN, "{{ tool | tojson }}", "", "the tool look"),
    "what a tool does": (FUNCTIONS, "// {{ f.description }}", "", "the description of the tool look"),
    "parameters": (
        QWEN,
        "{{ tool | tojson }}",
        "{{ tool.function.name }} {{ tool.function.description }}",
        "the parameter at of the tool look",
    ),
    "what a parameter is": (FUNCTIONS, "// {{ what.description }}", "", "what at is, a parameter of the tool look"),
    "the end of long messages": (
        QWEN,
        "user\n{{ m.content }}",
        "user\n{{ m.content[:9] }}",
        "message 0 (user)",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_what_a_template_does_not_write_is_refused(name, train_on):
    template, old, new, words = LOSSES[name]
    row = {**CALLING, "messages": [WORDY, *CALLING["messages"]]}
    if "system" in name:
        row = {"messages": [SYSTEM, SYSTEM, WORDY, ANSWER] if "second" in name else [WORDY, SYSTEM, USER, ANSWER]}
    assert encode_row(row, tokenizer(template), "row 7", train_on=train_on)
    with pytest.raises(RecipeError) as error:
        encode_row(row, tokenizer(replaced(template, old, new)), "row 7", train_on=train_on)
    assert f"row 7: the chat template does not write {words}" in str(error.value)


def test_a_system_prompt_of_the_recipe_is_looked_for_too():
    silent = replaced(HERMES, *ONLY_ROLES)
    with pytest.raises(RecipeError, match=r"does not write message 0 \(system\)"):
        encode_row({"messages": [USER, ANSWER]}, tokenizer(silent), "row 7", system="Be a pirate.")


@pytest.mark.parametrize("filters", ["| round(2)", "| trim", "| replace('\\n', ' ')", "| lower"])
def test_a_value_that_a_template_changes_is_refused(filters):
    """A probe has no such value: each row's own are looked for too."""
    writes = "{% for n, v in call.function.arguments.items() %}{{ n }}={{ v }};{% endfor %}"
    template = replaced(QWEN, "{{ call.function | tojson }}", "{{ call.function.name }} " + writes)
    value = 0.123456 if "round" in filters else "A b\nc\n"
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call(0, at=value)]}]}
    assert encode_row(row, tokenizer(template), "row 7")
    with pytest.raises(RecipeError, match="the argument at in the call of look in message 1 as the row has it, "):
        encode_row(row, tokenizer(replaced(template, "{{ v }}", "{{ v " + filters + " }}")), "row 7")


@pytest.mark.parametrize("way", ["v | tojson", "v", "[v]", "v | e", "v | tojson(ensure_ascii=True)"])
def test_values_are_found_however_they_are_written(way):
    arguments = {"a": 'say "hi"\n', "b": "ünï <x> & 🙂", "c": 1e-12, "d": -0.5, "e": 10**25, "f": None, "g": True}
    arguments |= {"h": {"i": [1, "two", {"j": 3.25}], "k": {}}, "l": "", "m": "   "}
    writes = "{% for n, v in call.function.arguments.items() %}{{ n }}={{ " + way + " }};{% endfor %}"
    template = replaced(QWEN, "{{ call.function | tojson }}", "{{ call.function.name }} " + writes)
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call(0, **arguments)]}]}
    assert encode_row(row, tokenizer(template), "row 7")


def test_a_probe_is_rendered_once_for_conversations_of_one_form():
    encoder, rendered = Encoder(tokenizer(QWEN)), []
    render = encoder.written.render
    encoder.written.render = lambda messages, tools: rendered.append(1) or render(messages, tools)
    rows = [json.loads(json.dumps(CALLING).replace("blue", f"blue {n}").replace("call0", f"c{n}ll0")) for n in range(5)]
    encoder.encode(rows, [f"row {n}" for n in range(5)])
    assert len(rendered) == 2  # once more for the argument that is 0


def test_a_probe_that_the_template_refuses_leaves_the_values():
    """A template may know its tools by name; then the names and values of the row itself are looked for."""
    knows = "{% if call.function.name != 'look' %}{{ raise_exception('unknown') }}{% endif %}"
    template = replaced(QWEN, "{{ call.function | tojson }}", knows + "{{ call.function | tojson }}")
    assert encode_row(CALLING, tokenizer(template), "row 7")
    with pytest.raises(RecipeError, match="does not write the argument at in the call of look in message 1;"):
        encode_row(CALLING, tokenizer(replaced(template, "call.function | tojson", "call.function.name")), "row 7")


def accepts(template: str, row: dict, **settings) -> bool:
    try:
        return bool(encode_row(row, tokenizer(template), "row 7", **settings))
    except RecipeError as error:
        assert "the chat template does not write" in str(error), str(error)
        return False


def using(arguments: str) -> str:
    """Qwen's template, which writes a call as its name and `arguments`."""
    return replaced(QWEN, "{{ call.function | tojson }}", "{{ call.function.name }} " + arguments)


CALLED = "call.function.arguments"
# As Kimi K2 writes a call: by its id, which has the name in it.
BY_ID = using(f"{{{{ {CALLED} | tojson }}}}").replace("{{ call.function.name }}", "{{ call.id }}")
# As templates write arguments of tools that they look up, in the schema's order.
BY_SCHEMA = using(
    "{% for tool in tools if tool.function.name == call.function.name %}"
    "{% for n in tool.function.parameters.properties %}{% if n in "
    + CALLED
    + " %}{{ n }}={{ "
    + CALLED
    + "[n] | tojson }};{% endif %}{% endfor %}{% endfor %}"
)
# As gpt-oss: a message may name its channel, of those that there are.
CHANNELS = QWEN.replace(
    "assistant\n{{ m.content }}", "assistant\n{% if m.channel in ['final', None] %}{{ m.content }}{% endif %}"
)
KNOWS = "{% for tool in tools or [] if tool.function.name != 'look' %}{{ raise_exception('who?') }}{% endfor %}"
CALL_BY_ID = call(0, at="sky") | {"id": "functions.look:0"}
ASKED = {"tools": [TOOL], "messages": [USER, {"role": "assistant", "tool_calls": [CALL_BY_ID]}]}


@pytest.mark.parametrize("template", [BY_ID, BY_SCHEMA, KNOWS + BY_ID, KNOWS + BY_SCHEMA, QWEN])
def test_templates_that_look_names_up_are_no_loss(template):
    assert accepts(template, ASKED)
    dropped = "{{ call.function.name }}" if "call.function.name }}" in template else "{{ call.id }}"
    assert not accepts(template.replace(f"{{{{ {CALLED} | tojson }}}}", dropped), ASKED) or template in (
        BY_SCHEMA,
        KNOWS + BY_SCHEMA,
        QWEN,
    )
    for kept in (f"{{{{ {CALLED}[n] | tojson }}}};", "call.function | tojson"):
        if kept in template:
            assert not accepts(template.replace(kept, "call.function.name" if "[n]" not in kept else ";"), ASKED)


def test_a_call_without_arguments_must_be_written_too():
    """Its name is the tool's, which is written."""
    row = {
        "tools": [TOOL],
        "messages": [USER, {"role": "assistant", "tool_calls": [call(0)]}, *CALLING["messages"][2:]],
    }
    for template in (QWEN, KNOWS + QWEN, BY_SCHEMA):
        assert accepts(template, row)
    for template in (KNOWS + QWEN, QWEN):
        assert not accepts(replaced(template, "{{ call.function | tojson }}", ""), row, train_on="last")


def test_a_field_that_a_template_obeys_is_no_loss():
    final = {"messages": [USER, ANSWER | {"channel": "final"}]}
    assert "m.channel" in CHANNELS and accepts(CHANNELS, final, train_on="all")
    with pytest.raises(RecipeError, match=r"does not write message 1 \(assistant\)"):
        encode_row(
            {"messages": [USER, ANSWER | {"channel": "other"}, MORE, LAST]},
            tokenizer(CHANNELS),
            "row 7",
            train_on="last",
        )


@pytest.mark.parametrize("value", [0, 0.0, False])
def test_an_argument_that_is_nothing_must_be_written_too(value):
    row = {
        "messages": [USER, {"role": "assistant", "tool_calls": [call(0, at="sky", inside=[{"n": value}], flag=value)]}]
    }
    assert accepts(using("{{ " + CALLED + " | tojson }}"), row)
    writes = "{% for n, v in " + CALLED + ".items() %}{{ n }}={{ VALUE }};{% endfor %}"
    assert accepts(using(writes.replace("VALUE", "v")), row)
    with pytest.raises(RecipeError, match="does not write the argument flag in the call of look in message 1"):
        encode_row(row, tokenizer(using(writes.replace("VALUE", "v or ''"))), "row 7")


SKIPS = "{% for n, p in tool.function.parameters.properties.items() if n not in ['type', 'description'] %}"
SKIPS += "{{ n }}: {{ p | tojson }}\n{% endfor %}"


def test_parameters_of_any_form_must_be_written():
    def tool(**parameters):
        return {"type": "function", "function": {"name": "look", "description": "One.\nTwo.", "parameters": parameters}}

    def writes(text):
        return replaced(QWEN, "{{ tool | tojson }}", "{{ tool.function.name }} {{ tool.function.description }} " + text)

    names = {name: {"type": "string", "description": f"the {name} of it"} for name in ("type", "description", "title")}
    row = {"messages": [USER, ANSWER], "tools": [tool(type="object", properties=names)]}
    assert accepts(writes("{{ tool.function.parameters | tojson }}"), row) and not accepts(writes(SKIPS), row)
    plain = {
        "messages": [USER | {"content": "type, description"}, ANSWER],
        "tools": [tool(type="object", properties={name: {"type": "string"} for name in names})],
    }
    assert accepts(writes("{{ tool.function.parameters | tojson }}"), plain) and not accepts(writes(SKIPS), plain)
    bare = {"messages": [USER, ANSWER], "tools": [tool(query={"type": "string", "description": "what to find"})]}
    assert accepts(writes("{{ tool.function.parameters | tojson }}"), bare)
    assert not accepts(writes("{{ tool.function.parameters.properties | default('') }}"), bare)
    first = writes("{{ tool.function.parameters | tojson }}").replace("description }}", "description.split('\n')[0] }}")
    assert not accepts(first, bare)
    for odd in (None, [], "text", {"properties": None}, {"properties": {"a": True}}, {"type": "object"}):
        assert accepts(QWEN, {"messages": [USER, ANSWER], "tools": [{"name": "f", "parameters": odd}]})


def test_words_that_a_template_takes_out_because_it_knows_them_are_no_loss():
    knows = HERMES.replace("{{ m.content }}", "{{ m.content.replace('/no_think', '').rstrip() }}")
    row = {"messages": [SYSTEM | {"content": "Be kind. /no_think"}, USER, ANSWER]}
    assert accepts(knows, row)
    assert not accepts(knows.replace("'/no_think'", "'/no_' ~ 'think'"), row)
    assert not accepts(knows.replace(", '')", ", '').replace('kind', 'so')"), row)


def test_values_that_are_no_json_are_fields_like_others():
    """As a parquet file has them: times, and bytes."""
    row = {"messages": [USER | {"at_time": datetime(2024, 1, 1), "raw": b"x", "end": 1}, ANSWER]}
    assert unread(row, CHATML) == ("at_time", "raw", "end")


# ---- other fields of messages


def unread(row, template):
    return Encoder(tokenizer(template)).encode([row], ["row 7"])[0].unread


def test_fields_of_messages_that_are_not_written_are_named():
    named = [USER | {"name": "Bob", "at": 5, "empty": ""}, ANSWER]
    assert unread({"messages": named}, CHATML) == ("name", "at")
    assert unread({"messages": named}, CHATML.replace("{{ message['c", "{{ message.name }}{{ message['c")) == ("at",)
    assert unread({"messages": [USER, ANSWER]}, CHATML) == ()
    assert unread(CALLING, QWEN) == ("tool_call_id",)


def test_images_of_messages_are_refused():
    with pytest.raises(RecipeError, match="row 7: message 0 has images, and only text is trained"):
        encode_row({"messages": [USER | {"images": ["a.png"]}, ANSWER]}, tokenizer(), "row 7")
    assert encode_row({"messages": [USER | {"images": []}, ANSWER]}, tokenizer(), "row 7")


# ---- thoughts in the answer's text


QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if '</think>' in m.content %}{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{% set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% else %}{% set said, thought = m.content, '' %}{% endif %}"
    "{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("thought", ["<think>r</think>", "r</think>", "<think>\nr\n</think>\n\n", "<think> r </think>"])
@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_a_thought_is_trained_as_the_template_writes_it(thought, train_on):
    coder, row = tokenizer(QWEN3), {"messages": [USER, ANSWER | {"content": thought + "ok"}]}
    (trained,) = trained_text(row, QWEN3, train_on=train_on)
    text = coder.apply_chat_template(row["messages"], tokenize=False)
    assert trained == text.partition("assistant\n")[2].rstrip() and " ".join(trained.split()).startswith("<think> r ")


def with_thought(content: str, **more) -> dict:
    return {"messages": [USER, ANSWER | {"content": content} | more]}


FORGETS = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize(
    "template, row",
    [
        (FORGETS, with_thought("<think>long</think>B")),
        (FORGETS, with_thought("<think>Paris</think>Paris")),
        ("{# enable_thinking #}" + CHATML, with_thought("B", reasoning_content="B")),
        ("{# thinking #}" + CHATML, with_thought("B", reasoning_content="a chain")),
        (QWEN3, with_thought("Visible words. <think>reasoned</think>answer")),
        (QWEN3, with_thought("Write <think> then </think> please")),
        (
            QWEN3,
            {"messages": [USER, *with_thought("<think>a</think>b <think>c</think> d")["messages"][1:], MORE, LAST]},
        ),
    ],
)
def test_a_thought_of_the_last_answer_and_what_is_no_thought_must_be_written(template, row, train_on):
    for tags in (False, True):
        marks = "{% generation %}{{ 'x' }}{% endgeneration %}" * tags
        with pytest.raises(
            RecipeError, match=r"row 7: the chat template (does not write|renders message 1 differently)"
        ):
            encode_row(row, tokenizer(marks + template), "row 7", train_on=train_on)


def test_what_stands_before_an_earlier_thought_must_be_written():
    row = {"messages": [USER, ANSWER | {"content": "Visible words. <think>reasoned</think>answer"}, MORE, LAST]}
    with pytest.raises(RecipeError, match=r"does not write message 1 \(assistant\) as the row has it, 'Visible words"):
        encode_row(row, tokenizer(QWEN3), "row 7", train_on="last")
    row["messages"][1]["content"] = "<think>reasoned</think>answer"
    assert encode_row(row, tokenizer(QWEN3), "row 7", train_on="last")


def test_a_thought_of_an_earlier_turn_names_the_way_out():
    thought = ANSWER | {"content": "<think>r</think>ok"}
    row = {"messages": [USER, thought, MORE, thought]}
    with pytest.raises(RecipeError, match=r"renders message 1 differently .* or data.train_on=last"):
        encode_row(row, tokenizer(QWEN3), "row 7")
    assert [text.count("r\n</think>") for text in trained_text(row, QWEN3, train_on="last")] == [1]
    shouts = QWEN3.replace("{{ said }}", "{{ said | upper }}")
    with pytest.raises(RecipeError) as error:
        encode_row({"messages": [USER, thought]}, tokenizer(shouts), "row 7")
    assert "data.train_on" not in str(error.value)


# ---- {% generation %}: transformers' mask, wherever a template's tags are


def tagged(begin: str, end: str) -> str:
    """ChatML whose tag begins and ends at two of the marks H (header), C (content), E (end) and N (new line)."""
    parts = {
        "H": "{{ '<|im_start|>assistant\n' }}",
        "C": "{{ m.content }}",
        "E": "{{ '<|im_end|>' }}",
        "N": "{{ '\n' }}",
    }
    text = "".join(
        "{% generation %}" * (mark == begin) + part + "{% endgeneration %}" * (mark == end)
        for mark, part in parts.items()
    )
    user = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + text + "{% else %}" + user + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


EXTENTS = ["HC", "HE", "HN", "CC", "CE", "CN"]
CHAT = [USER, ANSWER, MORE, LAST]


@pytest.mark.parametrize("begin, end", EXTENTS)
def test_tags_of_any_extent_are_what_is_trained(begin, end):
    coder = tokenizer(tagged(begin, end))
    known = coder.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encode_row({"messages": CHAT}, coder, "row 7")
    assert ids == known["input_ids"] and [int(each) for each in mask] == known["assistant_masks"]
    runs = np.flatnonzero(np.diff(known["assistant_masks"], prepend=0, append=0)).reshape(-1, 2)
    for row, which, train_on in (
        ({"messages": CHAT}, 1, "last"),
        ({"messages": [USER, ANSWER | {"train": False}, MORE, LAST]}, 1, "assistant"),
        ({"messages": [USER, ANSWER, MORE, LAST | {"weight": 0}]}, 0, "assistant"),
        ({"prompt": CHAT[:2], "completion": CHAT[2:]}, 1, "assistant"),
    ):
        mask = encode_row(row, coder, "row 7", train_on=train_on)[1]
        assert np.flatnonzero(mask).tolist() == list(range(*runs[which]))
    assert all(encode_row({"messages": CHAT}, coder, "row 7", train_on="all")[1])


TOUCHING = (  # as SmolLM3: header, end and new line are inside of the tag, so tags of two answers touch
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + m.content + "
    "'<|im_end|>\n' }}{% endgeneration %}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWICE = (  # the last answer has two tags, others none
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{% generation %}{{ '<think>x</think>' }}{% endgeneration %}{{ '\n' }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "messages, settings, parts",
    [
        ([USER, ANSWER, LAST], {"train_on": "last"}, [LAST]),
        ([USER, ANSWER | {"train": False}, LAST], {}, [LAST]),
        ([USER, ANSWER, LAST, MORE, ANSWER], {"train_on": "last"}, [ANSWER]),
        ([USER, ANSWER, LAST | {"weight": 0}, MORE, LAST], {}, [ANSWER, LAST]),
    ],
)
def test_answers_whose_tags_touch_are_told_apart(messages, settings, parts):
    texts = trained_text({"messages": messages}, TOUCHING, **settings)
    assert texts == [f"<|im_start|>assistant\n{part['content']}<|im_end|>\n" for part in parts]


def test_a_last_answer_with_two_tags_has_both():
    texts = trained_text({"messages": CHAT}, TWICE, train_on="last")
    assert texts == ["<think>x</think>", LAST["content"]]


def test_tags_around_the_last_answer_alone():
    last = tagged("C", "E").replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}")
    coder = tokenizer(last)
    known = coder.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    for train_on in ("assistant", "last"):
        mask = encode_row({"messages": CHAT}, coder, "row 7", train_on=train_on)[1]
        assert [int(each) for each in mask] == known["assistant_masks"]
    with pytest.raises(RecipeError, match=r"marks nothing of message 1 \(\{% generation %\}\), which is"):
        encode_row({"messages": [USER, ANSWER, MORE, LAST | {"train": False}]}, coder, "row 7")
    with pytest.raises(RecipeError, match=r"row 7: the chat template marks nothing of it \(\{% generation %\}\)"):
        encode_row({"messages": [USER, ANSWER, MORE]}, coder, "row 7")


def test_a_tagged_template_that_loses_something_is_refused():
    with pytest.raises(RecipeError, match=r"does not write message 0 \(system\)"):
        silent = tagged("C", "E").replace("{% else %}", "{% elif m.role != 'system' %}")
        encode_row({"messages": [SYSTEM, *CHAT]}, tokenizer(silent), "row 7")


# ---- the clock


def test_a_template_reads_the_day_that_it_is_given():
    """The rest of the text, its white space too, is as it was."""
    now = "{{ strftime_now('%d %b %Y|%-d of %B|%A %H:%M|100%% %j|%%d|%F') }}"
    template = (
        "\n  {%- if strftime_now is defined %}\n <" + now + ">{% endif %}\n  {%- if true %}\n" + CHATML + "{% endif %}"
    )
    coder, chat = tokenizer(template), [USER, ANSWER]
    (encoded,) = Encoder(coder, clock="2024-05-01").encode([{"messages": chat}], ["row 7"])
    known = coder.apply_chat_template(chat, tokenize=False)
    day = "01 May 2024|1 of May|Wednesday 00:00|100% 122|%d|2024-05-01"
    assert coder.decode(encoded.ids) == re.sub("<.*?2.*?>", f"<{day}>", known, count=1)


@pytest.mark.parametrize(
    "extra",
    [
        {"name": "look", "parameters": {"at": "sky"}},
        {"function": {"name": "look", "arguments": {"at": "sky"}, "thought": "why"}},
        {"function": {"name": "look", "arguments": {"at": "sky"}}, "result": "blue"},
    ],
)
def test_a_call_has_nothing_beside_its_name_and_arguments(extra):
    with pytest.raises(RecipeError, match=r"a tool call of message 1 has \w+; a call has a name and arguments"):
        read_row({"messages": [USER, {"role": "assistant", "tool_calls": [extra]}]}, "row 0")
    good = {"id": "a", "index": 0, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    read_row({"messages": [USER, {"role": "assistant", "tool_calls": [good]}]}, "row 0")


def test_two_contents_of_a_message_are_refused():
    turns = [{"from": "human", "value": "hi", "content": "lost words"}, {"from": "gpt", "value": "yo"}]
    with pytest.raises(RecipeError, match="message 0 has from and value and content; leave content out"):
        read_row({"conversations": turns}, "row 0")


@pytest.mark.parametrize("name", TOOLS)
def test_parameters_inside_of_parameters_are_written_or_refused(name):
    """Templates that write a schema as JSON have them; one that lists a tool's own parameters loses them."""
    inner = {"type": "object", "properties": {"latitude": {"type": "number"}}}
    schema = {"type": "object", "properties": {"at": inner, "far": {"type": "array", "items": inner}}}
    tool = {"type": "function", "function": {"name": "look", "description": "Looks up.", "parameters": schema}}
    row = {**CALLING, "tools": [tool]}
    coder = tokenizer(TOOLS[name])
    rendered = coder.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    if "latitude" in rendered:
        encode_row(row, coder, "row 7")
    else:
        with pytest.raises(RecipeError, match=r"does not write the parameter at\.latitude of the tool look"):
            encode_row(row, coder, "row 7")
