"""Chat: one raw row becomes token ids and a mask of the tokens that are trained.

The text is rendered once by the tokenizer's own chat template and tokenised once; trained tokens are those whose
characters lie inside an assistant's answer, its end-of-turn mark included. Invariant: the ids are exactly those of
the rendered conversation, so training sees what inference will.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from shardbook.recipe import RecipeError, first_line

Spans = list[tuple[int, int]]
# what may stand between header and answer: Qwen3 writes an empty thought before the last
BETWEEN = ("", "<think>\n\n</think>")
PLACEHOLDER = "\u2063placeholder\u2063"  # occurs in no template and no conversation
SHAPES = "messages, prompt and completion, or text"


def encode_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[list[int], list[bool]]:
    """Token ids and trained mask of one row, uncut. `where` names the row in errors. Raises RecipeError.

    `messages`: loss on the assistant's tokens. `prompt` and `completion`: as messages where they are lists, else plain
    text with loss on the completion. `text`: loss on every token. Plain text ends with the end-of-sequence token.
    """
    match row:
        case {"messages": list(messages)}:
            return _encode_chat(messages, tokenizer, where)
        case {"prompt": list(prompt), "completion": list(completion)}:
            return _encode_chat(prompt + completion, tokenizer, where, first_trained=len(prompt))
        case {"prompt": str(prompt), "completion": str(completion)}:
            if not completion.strip():
                raise RecipeError(f"{where}: completion is empty")
            text = prompt + completion + (tokenizer.eos_token or "")
            return _encode_text(text, [(len(prompt), len(text))], tokenizer, True)
        case {"text": str(text)}:
            if not text.strip():
                raise RecipeError(f"{where}: text is empty")
            text += tokenizer.eos_token or ""
            return _encode_text(text, [(0, len(text))], tokenizer, True)
    fields = ", ".join(name for name, value in row.items() if value is not None)
    raise RecipeError(f"{where}: has the fields {fields or 'none'}; needs {SHAPES}")


def _encode_chat(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str, first_trained: int = 0
) -> tuple[list[int], list[bool]]:
    for number, message in enumerate(messages):
        if not (isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
            raise RecipeError(f"{where}: message {number} needs a string role and a string content")
    text = _render(messages, tokenizer, where)
    mark = _end_of_turn(tokenizer)
    spans = [
        _answer_span(messages, number, text, mark, tokenizer, where)
        for number, message in enumerate(messages)
        if number >= first_trained and message["role"] == "assistant" and message["content"].strip()
    ]
    if not spans:
        raise RecipeError(f"{where}: no assistant text, so nothing to train on")
    return _encode_text(text, spans, tokenizer, False)  # the template writes its own special tokens


def _answer_span(
    messages: list[dict[str, Any]], number: int, text: str, mark: str, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[int, int]:
    """Characters of one answer in the rendered conversation: from after its header to its end-of-turn mark."""
    answer = messages[number]["content"].strip()
    if number:
        header = _render(messages[:number], tokenizer, where, add_generation_prompt=True)
    else:  # some templates refuse an empty list: the header of an opening answer is what stands before any content
        opening = {**messages[0], "content": PLACEHOLDER}
        header = _render([opening, *messages[1:]], tokenizer, where).partition(PLACEHOLDER)[0]
    start = text.find(answer, len(header))
    if not text.startswith(header) or start < 0 or text[len(header) : start].strip() not in BETWEEN:
        unlike = f"renders message {number} differently in the conversation than alone"
        raise RecipeError(f"{where}: the chat template {unlike}")
    end = start + len(answer)
    # whitespace at the answer's end, which we stripped and the template may keep, stands before the mark
    after = len(text) - len(text[end:].lstrip())
    if not text.startswith(mark, after):
        unlike = f"does not end message {number} with {mark!r}, as it ends a last one"
        raise RecipeError(f"{where}: the chat template {unlike}")
    return len(header), after + len(mark) if mark else end


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template puts after an answer, without the newline that some add before the next header."""
    probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    return _render(probe, tokenizer, "the chat template").rpartition("answer")[2].rstrip()


def _render(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str, add_generation_prompt: bool = False
) -> str:
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # jinja's errors, and whatever a template raises by itself
        raise RecipeError(f"{where}: the chat template refuses it ({first_line(error)})") from None
    assert isinstance(rendered, str)
    return rendered


def _encode_text(
    text: str, spans: Spans, tokenizer: PreTrainedTokenizerBase, special: bool
) -> tuple[list[int], list[bool]]:
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    mask, at = [False] * len(ids), 0
    for position, (start, end) in enumerate(encoded["offset_mapping"]):
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        # a token that begins before its span belongs to the header; (0, 0) is a special token the tokenizer added
        mask[position] = end > start and at < len(spans) and spans[at][0] <= start
    return ids, mask
