"""The loss mask against golden text: exactly the assistant's words and its end-of-turn mark."""

import pytest
from tiny import CHATML, encode_row, tokenizer, trained_text
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from shardbook.data.chat import Encoder
from shardbook.recipe import RecipeError

LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}[{{ m['role'] }}]\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
# Like Qwen3: an empty thought stands before the last answer only.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3 with enable_thinking=false: a generation prompt writes the empty thought that earlier answers lack.
THOUGHTFUL = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
# Like DeepSeek-R1: a generation prompt opens the thought, which is in the answer's text.
OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|endoftext|>{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = "<|im_start|>system\nBe assistant-like.<|im_end|>\n" + CHATML
CHAT = [
    {"role": "user", "content": "Hi, assistant"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "ok?"},
    {"role": "assistant", "content": "ok, ünï 🙂"},
]


@pytest.mark.parametrize(
    ("template", "golden"),
    [
        (CHATML, ["ok<|im_end|>", "ok, ünï 🙂<|im_end|>"]),
        (DEFAULT_SYSTEM, ["ok<|im_end|>", "ok, ünï 🙂<|im_end|>"]),
        (LLAMA3, ["ok<|im_end|>", "ok, ünï 🙂<|im_end|>"]),
        (THINKING, ["ok<|im_end|>", "ok, ünï 🙂<|im_end|>"]),
        (THOUGHTFUL, ["ok<|im_end|>", "ok, ünï 🙂<|im_end|>"]),
        (MISTRAL, [" ok<|endoftext|>", " ok, ünï 🙂<|endoftext|>"]),
    ],
)
def test_messages(template, golden):
    assert trained_text({"messages": CHAT}, template) == golden


def test_the_ids_are_those_of_the_template():
    coder = tokenizer()
    ids, _ = encode_row({"messages": CHAT}, coder, "row 7")
    assert ids == coder.apply_chat_template(CHAT, tokenize=True, return_dict=False)


def test_conversation_opened_by_the_assistant():
    chat = [{"role": "assistant", "content": "Welcome."}, {"role": "user", "content": "Thanks"}]
    assert trained_text({"messages": chat}, DEFAULT_SYSTEM) == ["Welcome.<|im_end|>"]


def test_what_a_generation_prompt_writes_is_not_trained():
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok"}]
    assert trained_text({"messages": chat}, OPENED) == ["hm\n</think>\n\nok<|im_end|>"]
    assert trained_text({"messages": chat}, CHATML) == ["<think>\nhm\n</think>\n\nok<|im_end|>"]
    for word in ("think", "<", "t"):  # which also stand in the empty thought
        chat = [CHAT[0], {"role": "assistant", "content": word}]
        assert trained_text({"messages": chat}, THINKING) == [word + "<|im_end|>"]


def test_an_opening_answer_that_also_stands_elsewhere_in_the_text():
    for answer in ("Be", "a", "assistant"):
        chat = [{"role": "assistant", "content": answer}, {"role": "user", "content": "Thanks"}]
        assert trained_text({"messages": chat}, DEFAULT_SYSTEM) == [answer + "<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, THINKING])
@pytest.mark.parametrize("answer", ["ok ", "ok\n", "ok\n\n"])
def test_whitespace_after_an_answer_does_not_lose_its_end_of_turn(template, answer):
    chat = [CHAT[0], {"role": "assistant", "content": answer}, CHAT[2], {"role": "assistant", "content": "fine"}]
    first, last = trained_text({"messages": chat}, template)
    assert first == answer + "<|im_end|>" and last.endswith("fine<|im_end|>")


@pytest.mark.parametrize("template", [CHATML, MISTRAL])
def test_spaces_that_a_tokenizer_trims_from_offsets_are_trained(template):
    """Indentation is a part of an answer, in RoBERTa's post-processor too, which says that its tokens are empty."""
    code = "def f(x):\n    return  x"
    chat = [CHAT[0], {"role": "assistant", "content": code}, CHAT[2], {"role": "assistant", "content": " 1 2"}]
    whole, trims = tokenizer(template), tokenizer(template)
    trims.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert (0, 0) not in (offsets := trims(code, return_offsets_mapping=True)["offset_mapping"]) and (11, 11) in offsets
    assert encode_row({"messages": chat}, trims, "row 7") == encode_row({"messages": chat}, whole, "row 7")


def test_prompt_and_completion():
    assert trained_text({"prompt": "1+1=", "completion": "2"}) == ["2<|endoftext|>"]
    chat = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    assert trained_text(chat) == ["ok, ünï 🙂<|im_end|>"]  # the answer inside the prompt is context


@pytest.mark.parametrize("prompt", ["1+1 =", "1+1 = ", "1+1 =  "])
@pytest.mark.parametrize("trims", [True, False])
def test_a_space_before_a_completion_is_the_tokens_that_it_begins(prompt, trims):
    """A token may hold the prompt's last space and the first word, and its offsets may leave the space out."""
    coder = joining()
    coder.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    ids, mask = encode_row({"prompt": prompt, "completion": "two"}, coder, "row 7")
    taught = coder.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    assert taught.strip() == "two<|endoftext|>" and coder.decode(ids) == prompt + "two<|endoftext|>"


def joining():
    """A tokenizer with one token for a space and the letter behind it, as large vocabularies have for words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({**{letter: at for at, letter in enumerate(letters)}, "Ġt": len(letters)}, [("Ġ", "t")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


# Like Phi 3's: an end of sequence after the last answer alone. Like Llama 2's: one after each, behind a space.
PHI = CHATML + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
LLAMA2 = MISTRAL.replace("}}<|endoftext|>", "}} <|endoftext|>")


@pytest.mark.parametrize(("template", "mark"), [(CHATML, "<|im_end|>"), (PHI, "<|im_end|>"), (LLAMA2, "<|endoftext|>")])
def test_the_end_of_a_turn_is_what_every_answer_ends_with(template, mark):
    assert Encoder(tokenizer(template)).template.end_of_turn() == mark
    for taught in trained_text({"messages": CHAT}, template):
        assert taught.rstrip().endswith(mark)


def test_text():
    assert trained_text({"text": "All of it."}, None) == ["All of it.<|endoftext|>"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "x", "answer": "y"},
            "row 7: has the fields question, answer; nearest to prompt and completion: lacks prompt",
        ),
        ({"messages": None, "text": None}, "row 7: has the fields none"),
        ({"messages": CHAT[:1]}, "row 7: no assistant text"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": "  "}]}, "row 7: no assistant text"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "row 7: message 1 needs a string role"),
        ({"messages": ["hi", "there"]}, "row 7: message 0 needs a string role"),
        ({"messages": [CHAT[0], None]}, "row 7: message 1 needs a string role"),
        ({"messages": []}, "row 7"),
        ({"text": "  "}, "row 7: text is empty"),
        ({"prompt": "x", "completion": ""}, "row 7: completion is empty"),
    ],
)
def test_rows_that_cannot_be_trained(row, message):
    with pytest.raises(RecipeError, match=message):
        encode_row(row, tokenizer(), "row 7")


def test_a_template_that_rewrites_answers_is_refused():
    shouting = CHATML.replace("message['content']", "message['content'] | upper")
    with pytest.raises(RecipeError, match=r"row 7: the chat template does not write message 0 \(user\)"):
        encode_row({"messages": CHAT}, tokenizer(shouting), "row 7")
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RecipeError, match=r"row 7: the chat template refuses it \(roles must alternate\)"):
        encode_row({"messages": CHAT}, tokenizer(refusing), "row 7")


def test_a_role_that_no_template_names_is_refused():
    """A template of chatml's kind writes every role, and a model has never seen it."""
    asked = {"role": "bot", "content": "a"}
    with pytest.raises(
        RecipeError, match=r"row 7: message 0 is of role 'bot': must be of .*; did you mean assistant\?"
    ):
        encode_row({"messages": [asked, *CHAT]}, tokenizer(), "row 7")
    with pytest.raises(RecipeError, match=r"message 0 is of role 'sytem': .*; did you mean system\?"):
        encode_row({"messages": [asked | {"role": "sytem"}, *CHAT]}, tokenizer(), "row 7")
    knows = CHATML.replace(
        "{{ message['content'] }}", "{% if message['role'] == 'bot' %}{% endif %}{{ message['content'] }}"
    )
    assert "bot" not in CHATML and encode_row({"messages": [asked, *CHAT]}, tokenizer(knows), "row 7")
