"""Fields of rows: the table of docs/data.md, row by row, and what is said of those that are not read."""

import itertools
import json
import re
from pathlib import Path

import pytest
from tiny import CHATML, tokenizer

from shardbook.data.chat import Encoder
from shardbook.data.fields import holds, read_fields
from shardbook.data.pairs import split_pair
from shardbook.recipe import RecipeError

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = [
    re.match(r"\| (.*?) \| `(.*)` \| (.*) \|$", line).groups()
    for line in PAGE.read_text().partition("## Shapes of rows")[2].splitlines()
    if line.startswith("| ") and "`{" in line
]


def trained(row: dict, is_pair: bool, columns: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """Returns the texts that are trained of a row, without their ends, and the names of fields that are not read."""
    row, left = read_fields(row, "row 7", is_pair, columns)
    coder = tokenizer(TEMPLATE)
    sides = split_pair(row, "row 7") if is_pair else [row]
    texts = []
    for each in Encoder(coder).encode(sides, ["row 7"] * len(sides)):
        runs = itertools.groupby(zip(each.ids, each.mask, strict=True), key=lambda both: both[1])
        texts += [
            re.sub(r"<\|im_end\|>|<\|endoftext\|>", "", coder.decode([i for i, _ in run])) for on, run in runs if on
        ]
        left += [f"{name} of messages" for name in each.unread]
    return texts, left


def test_there_are_fifty_shapes():
    assert len(SHAPES) == 50 and len({row for _, row, _ in SHAPES}) > 45


@pytest.mark.parametrize("name, row, words", SHAPES, ids=[name for name, _, _ in SHAPES])
def test_each_shape_is_read_as_the_page_says(name, row, words):
    row, is_pair = json.loads(row.replace("\\|", "|")), name.endswith("for dpo")
    if words.startswith("refused: "):
        with pytest.raises(RecipeError) as error:
            trained(row, is_pair)
        assert words.removeprefix("refused: ") in str(error.value)
        return
    texts, left = trained(row, is_pair)
    known, _, unread = words.partition("; not read: ")
    known = [text if text == "the call" else text.strip("`") for text in known.split(", ")]
    assert [
        "the call" if text.startswith('<call>{"name": "look", "arguments": {"at": ') else text for text in texts
    ] == known
    assert left == unread.split(", ") * bool(unread)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}]


def test_columns_choose_between_formats():
    both = {"messages": CHAT, "text": "Hello", "id": 3}
    assert trained(both, False, ("messages",)) == (["ok"], ["text", "id"])
    assert trained(both, False, ("text",)) == (["Hello"], ["messages", "id"])
    assert trained(both | {"text": " ", "id": None}, False) == (["ok"], [])
    verdict = {"prompt": "a", "completion": "b", "label": True}
    assert trained(verdict, False, ("completion",)) == (["b"], ["label"])
    with pytest.raises(RecipeError, match=r'as data.columns={messages = "messages"}, or leave the other out'):
        trained(both, False)
    prompts = {"prompt": "a", "instruction": "b", "chosen": "c", "rejected": "d"}
    assert trained(prompts, True, ("prompt",)) == (["c", "d"], ["instruction"])


@pytest.mark.parametrize("name", ["image", "images", "Videos", "audio"])
@pytest.mark.parametrize("value", ["a.png", ["a.png"], [{"bytes": "x"}], {"path": "a"}])
def test_media_are_refused(name, value):
    with pytest.raises(RecipeError, match=f"row 7: has {name}, and only text is trained"):
        trained({"messages": CHAT, name: value}, False)


def test_an_empty_field_of_a_format_is_none():
    """Else a pair would be read by a prompt that is empty, and lose the one that is not."""
    turns = {"messages": [], "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "ok"}]}
    assert trained(turns, False) == (["ok"], [])
    assert trained({"prompt": "", "completion": "", "instruction": "Hi", "output": "ok"}, False) == (["ok"], [])
    row, left = read_fields({"prompt": "", "instruction": "Do X", "chosen": "a", "rejected": "b"}, "row 7", True)
    assert left == [] and "prompt" not in row
    sides = {"chosen": [CHAT[0], CHAT[1]], "rejected": [CHAT[0], CHAT[1] | {"content": "no"}]}
    assert trained({"prompt": "", **sides}, True) == (["ok", "no"], [])


@pytest.mark.parametrize("value", [None, "", " ", [], {}, [None], [[]], [""]])
def test_a_field_that_holds_nothing_is_no_field(value):
    assert not holds(value) and trained({"messages": CHAT, "images": value, "id": value}, False) == (["ok"], [])
    assert holds(0) and holds(False) and holds([0]) and not holds({"bytes": None, "path": ""})
    assert trained({"messages": CHAT, "image": False, "audio": 0}, False) == (["ok"], ["image", "audio"])
    assert trained({"text": "Hi", "label": True}, False) == (["Hi"], ["label"])


# ---- special tokens, once


def special(begin: str, end: str):
    """A tokenizer that puts tokens before and after each text."""
    from tokenizers.processors import TemplateProcessing

    coder = tokenizer(None)
    words = [word for word in (begin, end) if word]
    coder.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join(filter(None, (begin, "$A", end))),
        special_tokens=[(word, coder.convert_tokens_to_ids(word)) for word in words],
    )
    return coder


BEGIN, END = "<|im_start|>", "<|endoftext|>"


@pytest.mark.parametrize("after", ["", END])
@pytest.mark.parametrize("text", ["Hello", BEGIN + "Hello", "Hello" + END, BEGIN + "Hello" + END])
def test_a_text_that_was_rendered_before_has_its_special_tokens_once(text, after):
    coder = special(BEGIN, after)
    for row in ({"text": text}, {"prompt": text.partition("lo")[0], "completion": "lo" + text.partition("lo")[2]}):
        (encoded,) = Encoder(coder).encode([row], ["row 7"])
        assert coder.decode(encoded.ids) == BEGIN + "Hello" + END
        assert (encoded.mask[-1] and not encoded.mask[0]) or "text" in row
    assert Encoder(coder).prompt(text.removesuffix(END), "row 7") == coder.convert_tokens_to_ids([BEGIN, *"Hello"])


def test_white_space_behind_an_end_is_no_reason_for_a_second_one():
    (encoded,) = Encoder(special(BEGIN, "")).encode([{"text": f"Hello{END}\n"}], ["row 7"])
    assert tokenizer(None).decode(encoded.ids) == f"{BEGIN}Hello{END}\n"


def test_rows_of_a_conversation_keep_the_tokens_of_the_template_alone():
    coder = special(BEGIN, END)
    coder.chat_template = CHATML
    (encoded,) = Encoder(coder).encode([{"messages": CHAT}], ["row 7"])
    assert encoded.ids.tolist() == coder.apply_chat_template(CHAT, return_dict=False)
