"""Rows as people have them: what each format becomes, what of it is trained, and what is said of one that is none."""

import json

import pytest
from tiny import CHATML, encode_row, tokenizer, trained_text

from shardbook.data.formats import FORMATS, Chat, Text, read_row, without_none
from shardbook.data.pairs import split_pair
from shardbook.recipe import RecipeError
from shardbook.recipe.data import FIELDS

# As Qwen writes tools, their calls and what they return; its last answer begins with an empty thought.
QWEN = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.last and not enable_thinking %}<think>

</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>tool
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As Llama 3.1: a call is the whole message, as JSON.
LLAMA = (
    "{% for m in messages %}<|im_start|>[{{ m.role }}]\n\n{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>[assistant]\n\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OLD = {"function_call": {"name": "look", "arguments": "{}"}}  # of OpenAI before tool_calls
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}
TOOL = {"role": "tool", "content": "blue"}
CALLING = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOOL, ANSWER]
SAID = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call><|im_end|>'


def whole_text(row, template=CHATML, **settings):
    coder = tokenizer(template)
    return coder.decode(encode_row(row, coder, "row 7", **settings)[0])


def messages_of(row, **settings):
    return [(m["role"], m["content"]) for m in read_row(row, "row 7", **settings).messages]


# ---- formats


def test_conversations():
    turns = [("system", "Be kind."), ("human", "Hi"), ("gpt", "ok"), ("observation", "blue"), ("bard", "yes")]
    row = {"conversations": [{"from": said, "value": value, "weight": None} for said, value in turns]}
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert messages_of(row) == [(role, value) for role, (_, value) in zip(roles, turns, strict=True)]
    assert trained_text(row) == ["ok<|im_end|>", "yes<|im_end|>"]
    assert messages_of({"conversations": [USER, ANSWER]}) == [("user", "Hi"), ("assistant", "ok")]
    assert messages_of({"conversations": [USER | {"role": "developer"}, ANSWER]})[0] == ("developer", "Hi")


def test_conversations_with_tools():
    call = json.dumps(CALL["function"])
    turns = [("human", "Hi"), ("function_call", call), ("observation", "blue"), ("gpt", "ok")]
    row = {"conversations": [{"from": said, "value": value} for said, value in turns]}
    row |= {"system": "Be kind.", "tools": json.dumps([SCHEMA])}
    assert trained_text(row, QWEN) == [SAID, "ok<|im_end|>"]
    assert whole_text(row, QWEN).startswith("<|im_start|>system\nBe kind.\n<tools>" + json.dumps(SCHEMA))
    row["conversations"][1]["value"] = CALL["function"]
    assert trained_text(row, QWEN) == [SAID, "ok<|im_end|>"]
    row["conversations"][1]["value"] = "look at the sky"  # no JSON: then it is an answer
    assert trained_text(row, QWEN) == ["look at the sky<|im_end|>", "ok<|im_end|>"]


def test_instructions():
    row = {"instruction": "Add.", "input": "1+1", "output": "2", "history": [["Hi", "ok"]], "system": "Be brief."}
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "ok"), ("user", "Add.\n1+1"), ("assistant", "2")]
    assert messages_of(row) == said
    assert trained_text(row) == ["ok<|im_end|>", "2<|im_end|>"]
    assert messages_of({"instruction": "Add.", "input": "", "output": "2"}) == [("user", "Add."), ("assistant", "2")]


@pytest.mark.parametrize("arguments", [{"at": "sky", "of": None}, '{"at": "sky"}'])
def test_messages_with_tools(arguments):
    """As `datasets` gives them back: None wherever another row has a key."""
    call = {"id": None, "type": "function", "function": {"name": "look", "arguments": arguments, "other": None}}
    rows = [USER | {"tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [call]}, TOOL, ANSWER]
    schema = {"type": "function", "function": {**SCHEMA["function"], "description": None}}
    row = without_none({"messages": rows, "tools": [schema]})
    rows = row["messages"]
    assert trained_text(row, QWEN) == [SAID, "ok<|im_end|>"]
    assert trained_text(row, QWEN, train_on="last") == ["ok<|im_end|>"]
    called = '{"name": "look", "parameters": {"at": "sky"}}<|im_end|>'
    assert trained_text({"messages": rows}, LLAMA) == [called, "ok<|im_end|>"]
    coder = tokenizer(QWEN)
    clean = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL, ANSWER]
    assert encode_row(row, coder, "row 7")[0] == coder.apply_chat_template(clean, tools=[SCHEMA], return_dict=False)
    assert trained_text({"messages": CALLING[:2]}, QWEN) == [SAID]  # a call that ends a row, without its empty thought
    both = [USER, {"role": "assistant", "content": "I look. ", "tool_calls": [CALL, CALL]}, TOOL]
    assert trained_text({"messages": both}, QWEN) == ["I look. " + SAID.replace("<|im_end|>", "") + SAID]


def test_a_template_that_rewrites_calls_is_refused():
    counting = CHATML.replace(
        "{{ message['c", "{{ message.tool_calls | default('') }}{{ messages | length }}{{ message['c"
    )
    with pytest.raises(
        RecipeError, match=r"row 7: the chat template renders message 1 differently .* data.train_on=last"
    ):
        trained_text({"messages": CALLING}, counting)


def test_a_thought_of_its_own_is_trained():
    thinking = CHATML.replace("{{ message['c", "{{ message.thinking | default('') }}{{ message['c")
    row = {"messages": [USER, ANSWER | {"thinking": "<think>\nhm\n</think>\n\n"}]}
    assert trained_text(row, thinking) == ["<think>\nhm\n</think>\n\nok<|im_end|>"]


def test_prompts_and_text():
    assert read_row({"prompt": "1+1=", "completion": "2"}, "row 7") == Text("1+1=", "2")
    assert read_row({"prompt": "1+1=", "completion": "2"}, "row 7", train_on="all") == Text("", "1+1=2")
    assert read_row({"text": "All of it."}, "row 7", system="x") == Text("", "All of it.")
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "tools": [SCHEMA]}
    assert read_row(row, "row 7") == Chat([USER, ANSWER, USER, ANSWER], [3], [SCHEMA])
    assert read_row(row, "row 7", system="Be kind.").trained == [4]


# ---- pairs


def sides(row):
    chosen, rejected = split_pair(row, "row 7")
    assert chosen["prompt"] == rejected["prompt"]
    return chosen["prompt"], chosen["completion"], rejected["completion"]


NO = {"role": "assistant", "content": "no"}
TURNS = [{"from": "human", "value": "Hi"}]


@pytest.mark.parametrize(
    ("row", "split"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("a", "b", "c")),
        ({"prompt": "a:", "chosen": "a: b", "rejected": "a: c"}, ("a:", " b", " c")),  # both repeat the prompt
        ({"prompt": "a", "chosen": "ab", "rejected": "c"}, ("a", "ab", "c")),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [NO]}, ([USER], [ANSWER], [NO])),
        ({"prompt": "Hi", "chosen": ANSWER, "rejected": NO}, ([USER], [ANSWER], [NO])),
        ({"prompt": [USER], "chosen": "ok", "rejected": "no"}, ([USER], [ANSWER], [NO])),
        # both begin with the prompt; as in ultrafeedback_binarized, whose prompt is text
        ({"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, NO]}, ([USER], [ANSWER], [NO])),
        ({"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, NO]}, ([USER], [ANSWER], [NO])),
        ({"prompt": "Hi", "chosen": [ANSWER], "rejected": [NO]}, ([USER], [ANSWER], [NO])),
        # no prompt: what both begin with
        (
            {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, NO]},
            ([USER, ANSWER, USER], [ANSWER], [NO]),
        ),
        ({"chosen": [USER | {"name": None}, ANSWER], "rejected": [USER, NO]}, ([USER], [ANSWER], [NO])),
        # as LLaMA-Factory has them
        (
            {
                "conversations": TURNS,
                "chosen": {"from": "gpt", "value": "ok"},
                "rejected": {"from": "gpt", "value": "no"},
            },
            ([USER], [ANSWER], [NO]),
        ),
        ({"instruction": "Hi", "input": "", "chosen": "ok", "rejected": "no"}, ([USER], [ANSWER], [NO])),
    ],
)
def test_pairs(row, split):
    assert sides(row) == split


def test_pairs_of_text_have_no_system_prompt():
    chosen, _ = split_pair({"prompt": "a", "chosen": "b", "rejected": "c", "system": "Be kind."}, "row 7")
    with pytest.raises(RecipeError, match="row 7: has system beside completion that is text"):
        read_row(chosen, "row 7")


def test_pairs_with_tools():
    row = {"chosen": CALLING, "rejected": [*CALLING[:3], NO], "tools": [SCHEMA], "system": "Be kind."}
    chosen, rejected = split_pair(row, "row 7")
    assert trained_text(chosen, QWEN) == ["ok<|im_end|>"] and trained_text(rejected, QWEN) == ["no<|im_end|>"]
    assert "Be kind." in whole_text(chosen, QWEN) and json.dumps(SCHEMA) in whole_text(rejected, QWEN)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected adds nothing"),
        (
            {"chosen": "a b", "rejected": "a c"},
            "has the fields chosen, rejected; a preference needs prompt.* lacks prompt: text does not say where",
        ),
        ({"question": "a", "chosen": "b", "rejected": "c"}, r".*lacks prompt \(is that question\?\)"),
        ({"prompt": "a", "chosen": 1, "rejected": 2}, ".*: prompt is text, chosen is a number, rejected is a number"),
        ({"prompt": "a", "chosen": "b"}, ".*; lacks rejected"),
        ({"prompt": 5, "chosen": [ANSWER], "rejected": [NO]}, ".*: prompt is a number, chosen is a list"),
        ({"prompt": "a:", "chosen": "a:", "rejected": "a: c"}, "chosen adds nothing"),
        ({"prompt": "a", "chosen": ["x", "a"], "rejected": ["x", "b"]}, "a message is text, must be a table"),
        ({"prompt": [5], "chosen": [ANSWER], "rejected": [NO]}, "a message is a number, must be a table"),
        ({"chosen": [USER], "rejected": [USER, NO]}, "chosen adds nothing"),
        (
            {"prompt": "Bye", "chosen": [USER, ANSWER], "rejected": [USER, NO]},
            "chosen and rejected begin alike, but not with prompt",
        ),
        ({"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [NO]}, "rejected does not begin with prompt"),
    ],
)
def test_pairs_that_are_none(row, message):
    with pytest.raises(RecipeError, match="row 7: " + message):
        split_pair(row, "row 7")


# ---- what is trained

CHAT = [USER, ANSWER, USER, NO]
FIRST, LAST = "ok<|im_end|>", "no<|im_end|>"


def flagged(name, *flags):
    return {"messages": [message | {name: flag} for message, flag in zip(CHAT, flags, strict=True)]}


@pytest.mark.parametrize(
    ("row", "train_on", "golden"),
    [
        ({"messages": CHAT}, "assistant", [FIRST, LAST]),
        ({"messages": CHAT}, "last", [LAST]),
        ({"messages": [*CHAT, {"role": "assistant", "content": " "}]}, "last", [LAST]),
        (flagged("train", None, False, False, True), "assistant", [LAST]),
        (flagged("weight", None, 1, None, 0), "assistant", [FIRST]),
        (flagged("train", None, True, None, None), "last", [FIRST, LAST]),
        (flagged("train", None, True, None, False), "last", [FIRST]),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "last", [LAST]),
        ({"prompt": "1+1=", "completion": "2"}, "last", ["2<|endoftext|>"]),
        ({"prompt": "1+1=", "completion": "2"}, "all", ["1+1=2<|endoftext|>"]),
    ],
)
def test_what_is_trained(row, train_on, golden):
    assert trained_text(row, train_on=train_on) == golden


def test_every_token_is_trained():
    for messages in (CHAT, [USER]):
        ids, mask = encode_row({"messages": messages}, tokenizer(), "row 7", train_on="all")
        assert all(mask) and ids == tokenizer().apply_chat_template(messages, return_dict=False)


def test_a_flag_does_not_change_the_ids():
    row = flagged("weight", None, 1, None, 0)
    assert whole_text(row) == whole_text({"messages": CHAT})


def test_a_default_system_prompt():
    kind = ("system", "Be kind.")
    for row in ({"messages": CHAT}, {"instruction": "Hi", "output": "ok"}, {"conversations": CHAT}):
        assert messages_of(row, system="Be kind.")[0] == kind
        assert messages_of(row | {"system": "Be brief."}, system="Be kind.")[0] == ("system", "Be brief.")
    assert messages_of({"messages": [{"role": "system", "content": "x"}, *CHAT]}, system="Be kind.")[0][1] == "x"
    assert trained_text(flagged("weight", None, 1, None, 0), system="Be kind.") == [FIRST]


def test_kwargs_reach_the_template_and_its_prompt():
    row = {"messages": [USER, ANSWER]}
    assert "<think>" in whole_text(row, QWEN) and trained_text(row, QWEN) == [FIRST]
    assert "<think>" not in whole_text(row, QWEN, kwargs={"enable_thinking": True})


# ---- {% generation %}: transformers' own mask, where a template says what the assistant writes

MARKED = {
    "ChatML": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "Llama 3": (
        "{{ '<|endoftext|>' }}{% for m in messages %}{{ '[' + m.role + ']\n\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content | trim + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ m.content | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
    ),
    "SmolLM": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
        "{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}"
        "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}{% generation %}"
        "{{ m.content.lstrip('\n') + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}{% endif %}"
    ),
    "Mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
        "{% generation %}{{ ' ' + m.content + '<|endoftext|>' }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("answers", [("ok", "ok, ünï 🙂"), ("Hi", "assistant"), ("a\n\nb", "[/INST]")])
def test_spans_are_what_a_template_marks_as_generated(name, answers):
    coder, (first, last) = tokenizer(MARKED[name]), answers
    chat = [USER, {"role": "assistant", "content": first}, USER, {"role": "assistant", "content": last}]
    theirs = coder.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encode_row({"messages": chat}, coder, "row 7")
    assert ids == theirs["input_ids"] and [int(trained) for trained in mask] == list(theirs["assistant_masks"])
    assert 0 < sum(mask) < len(mask)


# ---- what is none


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"mesages": []}, "has the fields mesages; nearest to messages: lacks messages (is that mesages?)"),
        ({"prompt": "x"}, "has the fields prompt; nearest to prompt and completion: lacks completion"),
        ({"instruction": "x", "response": "y"}, "nearest to instruction and output: lacks output"),
        ({"prompt": "x", "completion": [ANSWER]}, "prompt is text, completion is a list"),
        ({"messages": "Hi"}, "nearest to messages: messages is text"),
        (
            {"zzz": 1},
            "has the fields zzz; needs messages, conversations, prompt and completion, instruction and output",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "a preference, which method = dpo, orpo, simpo and reward train",
        ),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "message 0 is from 'alien'; must be of human, gpt"),
        ({"conversations": [{"value": "x"}]}, "message 0 of conversations needs from and value"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, "history 0 must be two texts"),
        ({"instruction": "x", "output": "y", "input": 3}, "input is a number, must be text"),
        (flagged("weight", None, 0.5, None, None), "message 1 has weight = 0.5; must be 0 or 1"),
        (flagged("train", True, None, None, None), "message 0 is of role user and asks to be trained"),
        (flagged("train", None, False, None, False), "each answer asks not to be trained"),
        ({"messages": CHAT, "system": 3}, "system is a number"),
        ({"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"}, "and another system message"),
        ({"messages": CHAT, "tools": "[{"}, "tools = '[{': is not JSON"),
        ({"messages": CHAT, "tools": '"look"'}, "tools must be a list of JSON schemas"),
        (
            {"messages": CHAT, "tools": [SCHEMA]},
            "the chat template does not write the tool look; set data.chat_template",
        ),
        ({"messages": CALLING}, "the chat template does not write the call of look in message 1"),
        ({"messages": [USER, ANSWER | {"reasoning_content": "hm"}]}, "does not write reasoning_content in message 1"),
        ({"messages": [USER, ANSWER | {"tool_calls": [{}]}]}, "a tool call of message 1 needs a name"),
        (
            {"messages": [USER, ANSWER | {"tool_calls": [{"name": "look", "arguments": "{"}]}]},
            "arguments of look in message 1 = '{': is not JSON",
        ),
        (
            {"messages": [USER, ANSWER | {"role": "Assistant"}]},
            "no assistant text, so nothing to train on; its roles are user, Assistant; is 'Assistant' assistant?",
        ),
        (
            {"messages": [USER | {"role": "human"}, ANSWER | {"role": "bot"}]},
            "human, bot; is 'human' user?; is 'bot' assist",
        ),
        ({"messages": [USER, USER | {"role": "developer"}]}, "its roles are user, developer"),
        ({"messages": [USER, ANSWER | {"content": " "}]}, "its roles are user, assistant"),
        ({"messages": TURNS}, "message 0 has from and value; name their field conversations, not messages"),
        ({"messages": [USER, ANSWER | OLD]}, "does not write function_call look in message 1; set data.chat_template"),
        ({"messages": [USER, {"role": "assistant", "content": None} | OLD]}, "does not write function_call look"),
        ({"messages": [USER, ANSWER | {"function_call": "look"}]}, "a tool call of message 1 needs a name"),
        (
            {"conversations": [{"from": "human", "value": "Hi"} | USER, ANSWER]},
            "message 0 has from and value, and role",
        ),
        (
            {"messages": [USER, ANSWER | {"function_call": {"function": {"name": "f"}}}]},
            "write function_call f in message",
        ),
        ({"messages": [USER, ANSWER | {"content": "", "poem": "x"}]}, "message 1 is empty and the chat template does"),
        ({"messages": [USER, ANSWER | {"tool_calls": 5}]}, "tool_calls of message 1 is a number, must be a list"),
        ({"messages": [USER, ANSWER | {"tool_calls": "5"}]}, "tool_calls of message 1 is a number, must be a list"),
        ({"messages": CHAT, "tools": [{"type": "function", "function": "look"}]}, "tools must be a list of JSON"),
        ({"conversations": [{"from": "function_call", "value": 5}]}, "a tool call of message 0 needs a name"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "message 0 is from ['human']; must be of human"),
        ({"instruction": "x", "output": "y", "history": 5}, "history is a number, must be a list"),
        (
            {"messages": [USER, ANSWER | {"train": True, "weight": 0}]},
            "message 1 has weight and train, and they",
        ),
        ({"prompt": "p", "completion": " c", "system": "x"}, "has system beside completion that is text; only conv"),
        ({"text": "p", "tools": [SCHEMA]}, "has tools beside text that is text; only conversations have tools"),
    ],
)
def test_rows_that_are_refused(row, message):
    with pytest.raises(RecipeError) as error:
        encode_row(row, tokenizer(), "row 7")
    assert str(error.value).startswith("row 7: ") and message in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("train_on", ["last", "all"])
def test_a_call_that_is_not_written_is_refused_where_it_is_not_trained(train_on):
    with pytest.raises(RecipeError, match=r"row 7: the chat template does not write the call of look in message 1"):
        encode_row({"messages": CALLING}, tokenizer(), "row 7", train_on=train_on)


def test_a_function_call_that_the_template_writes_is_trained():
    writes = CHATML.replace("{{ message['c", "{{ message.function_call.name if message.function_call }}{{ message['c")
    assert trained_text({"messages": [USER, {"role": "assistant"} | OLD]}, writes) == ["look<|im_end|>"]


def test_a_flag_beside_every_token_is_refused():
    with pytest.raises(RecipeError, match=r"message 1 asks not to be trained, and data.train_on = 'all'"):
        encode_row(flagged("train", None, False, None, True), tokenizer(), "row 7", train_on="all")


def test_every_field_of_a_format_can_be_a_column_of_another_name():
    assert {field for fields in FORMATS.values() for field in fields} <= set(FIELDS)
