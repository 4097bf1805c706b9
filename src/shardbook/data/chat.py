"""Chat: one raw row becomes token ids and a mask of the tokens that are trained.

The text is rendered once by the tokenizer's own chat template and tokenised once; trained tokens are those whose
characters lie inside an assistant's answer, its end-of-turn mark included. Invariant: the ids are exactly those of
the rendered conversation, so training sees what inference will.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardbook.recipe import RecipeError, first_line

Spans = list[tuple[int, int]]
# what may stand between header and answer: Qwen3 writes an empty thought before the last
BETWEEN = ("", "<think>\n\n</think>")
PLACEHOLDER = "\u2063placeholder\u2063"  # occurs in no template and no conversation
PLAIN = ("role", "content")
SHAPES_KEPT = 4096  # of conversations by their roles
CHECKED = 16  # messages from the beginning
_SPACE = re.compile(r"\s*")
SHAPES = "messages, prompt and completion, or text"


def encode_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[list[int], list[bool]]:
    """Token ids and trained mask of one row, uncut; see `Encoder.encode`."""
    ((ids, mask),) = Encoder(tokenizer).encode([row], [where])
    return ids.tolist(), mask.tolist()


class Encoder:
    """Rows to tokens with one tokenizer. Remembers how its template writes conversations of the same roles, so that a
    row of n messages is rendered once and not n times."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.end_of_turn = functools.cache(self._find_end_of_turn)
        self.header = functools.lru_cache(SHAPES_KEPT)(self._render_header)
        self.shape = functools.lru_cache(SHAPES_KEPT)(self._find_shape)

    def encode(self, rows: Sequence[dict[str, Any]], wheres: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids (int64) and trained mask (bool) of each row, uncut. Raises RecipeError, which names it by `wheres`.

        `messages`: loss on the assistant's tokens. `prompt` and `completion`: as messages where they are lists, else
        text with loss on the completion. `text`: loss on every token. Text ends with the end-of-sequence token.
        """
        rendered = [self._render_row(row, where) for row, where in zip(rows, wheres, strict=True)]
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for special in (False, True):
            if numbers := [number for number, text in enumerate(rendered) if text.special is special]:
                encoded = self.tokenizer(
                    [rendered[number].text for number in numbers],
                    add_special_tokens=special,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                    return_offsets_mapping=True,
                    verbose=False,
                )
                for number, ids, offsets in zip(numbers, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                    found[number] = np.array(ids, dtype=np.int64), _mark(offsets, rendered[number].spans)
        return [found[number] for number in range(len(rendered))]

    def prompt(self, text: str, where: str) -> list[int]:
        """Token ids of what a model reads before it answers `text`; without a chat template it continues `text`."""
        if not self.tokenizer.chat_template:
            return list(self.tokenizer(text)["input_ids"])
        rendered = self._render([{"role": "user", "content": text}], where, add_generation_prompt=True)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _render_row(self, row: dict[str, Any], where: str) -> "Rendered":
        match row:
            case {"messages": list(messages)}:
                return self._render_chat(messages, where)
            case {"prompt": list(prompt), "completion": list(completion)}:
                return self._render_chat(prompt + completion, where, first_trained=len(prompt))
            case {"prompt": str(prompt), "completion": str(completion)}:
                if not completion.strip():
                    raise RecipeError(f"{where}: completion is empty")
                text = prompt + completion + (self.tokenizer.eos_token or "")
                return Rendered(text, [(len(prompt), len(text))], True)
            case {"text": str(text)}:
                if not text.strip():
                    raise RecipeError(f"{where}: text is empty")
                text += self.tokenizer.eos_token or ""
                return Rendered(text, [(0, len(text))], True)
        fields = ", ".join(name for name, value in row.items() if value is not None)
        raise RecipeError(f"{where}: has the fields {fields or 'none'}; needs {SHAPES}")

    def _render_chat(self, messages: list[dict[str, Any]], where: str, first_trained: int = 0) -> "Rendered":
        for number, message in enumerate(messages):
            if not (isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
                raise RecipeError(f"{where}: message {number} needs a string role and a string content")
        text = self._render(messages, where)
        headers = self._find_headers(messages, text)
        spans = [
            self._answer_span(messages, number, text, headers[number] if headers else None, where)
            for number, message in enumerate(messages)
            if number >= first_trained and message["role"] == "assistant" and message["content"].strip()
        ]
        if not spans:
            raise RecipeError(f"{where}: no assistant text, so nothing to train on")
        return Rendered(text, spans, False)  # the template writes its own special tokens

    def _answer_span(
        self, messages: list[dict[str, Any]], number: int, text: str, header: int | None, where: str
    ) -> tuple[int, int]:
        """Characters of one answer in `text`: from its header's end, `header` where known, to its end-of-turn mark."""
        answer = messages[number]["content"].strip()
        if header is None:
            alone = self._render_before(messages, number, where)
            header = len(alone) if text.startswith(alone) else -1
        start = text.find(answer, header)
        if header < 0 or start < 0 or text[header:start].strip() not in BETWEEN:
            unlike = f"renders message {number} differently in the conversation than alone"
            raise RecipeError(f"{where}: the chat template {unlike}")
        end = start + len(answer)
        # whitespace at the answer's end, which we stripped and the template may keep, stands before the mark
        after = _SPACE.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing, too
        mark = self.end_of_turn()
        if not text.startswith(mark, after):
            unlike = f"does not end message {number} with {mark!r}, as it ends a last one"
            raise RecipeError(f"{where}: the chat template {unlike}")
        return header, after + len(mark) if mark else end

    def _find_headers(self, messages: list[dict[str, Any]], text: str) -> list[int] | None:
        """Where the header of each message ends in `text`, or None where the template does not write these messages as
        it writes placeholders of the same roles: then each answer's header is rendered by itself."""
        if any(value is not None for message in messages for key, value in message.items() if key not in PLAIN):
            return None
        shape = self.shape(tuple(message["role"] for message in messages))
        if shape is None or not text.startswith(shape[0][0] + shape[0][1]):
            return None
        headers, at = [], 0
        for (header, thought), (after, thought_after), message in zip(shape, shape[1:], messages, strict=False):
            headers.append(at + len(header))
            at, follows = at + len(header) + len(thought), after + thought_after
            for content in (message["content"], message["content"].strip()):
                if text.startswith(content, at) and text.startswith(follows, at + len(content)):
                    at += len(content)
                    break
            else:
                return None
        return headers if at + len(shape[-1][0]) == len(text) else None

    def _find_shape(self, roles: tuple[str, ...]) -> list[tuple[str, str]] | None:
        """What the template writes before each message of a conversation of `roles`, in two parts: its header, and what
        may stand between that and an answer; then what it writes after the last one. None where an answer's header is
        not what is written before it alone, with any content."""
        messages = _placeholders(roles)
        try:
            text = self._render(messages, "")
            shape, at, known = [], 0, dict[tuple[str, tuple[str, ...]], tuple[str, str]]()
            for number, message in enumerate(messages):
                begin = text.find(message["content"], at)
                if begin < 0 or text.find(message["content"], begin + 1) > 0:
                    return None
                before = text[at:begin]
                parts = before, ""
                if message["role"] == "assistant" and number:
                    # not each of a long conversation alone: a template knows roles, the beginning and the end
                    place = before, roles[max(0, number - 2) : number]
                    if number < CHECKED or number >= len(roles) - 2 or place not in known:
                        alone = self.header(roles[:number])
                        known[place] = alone[at:], text[len(alone) : begin]
                        if not text.startswith(alone) or len(alone) > begin or known[place][1].strip() not in BETWEEN:
                            return None
                    parts = known[place]
                shape.append(parts)
                at = begin + len(message["content"])
        except RecipeError:  # what the template refuses it refuses in the conversation too, which says so
            return None
        return [*shape, (text[at:], "")]

    def _render_header(self, roles: tuple[str, ...]) -> str:
        return self._render_before([*_placeholders(roles), {"role": "assistant", "content": ""}], len(roles), "")

    def _render_before(self, messages: list[dict[str, Any]], number: int, where: str) -> str:
        """What the model has read when it begins to write message `number`."""
        if number:
            return self._render(messages[:number], where, add_generation_prompt=True)
        # some templates refuse an empty list: the header of an opening answer is what stands before any content
        opening = {**messages[0], "content": PLACEHOLDER}
        return self._render([opening, *messages[1:]], where).partition(PLACEHOLDER)[0]

    def _find_end_of_turn(self) -> str:
        """What the template puts after an answer, without the newline that some add before the next header."""
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        return self._render(probe, "the chat template").rpartition("answer")[2].rstrip()

    def _render(self, messages: list[dict[str, Any]], where: str, add_generation_prompt: bool = False) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # jinja's errors, and whatever a template raises by itself
            raise RecipeError(f"{where}: the chat template refuses it ({first_line(error)})") from None
        assert isinstance(rendered, str)
        return rendered


class Rendered(NamedTuple):
    """The text of a row, the characters of it that are trained, and whether the tokenizer adds its special tokens."""

    text: str
    spans: Spans
    special: bool


def _placeholders(roles: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{PLACEHOLDER}{number}."} for number, role in enumerate(roles)]


def _mark(offsets: list[tuple[int, int]], spans: Spans) -> np.ndarray:
    """Which tokens begin inside one of `spans`, which are in order and apart: one that begins before belongs to the
    header; (0, 0) is a special token that the tokenizer added."""
    flat = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets))  # thrice as fast as array
    starts, ends = flat[::2], flat[1::2]
    first, last = np.array([*spans, (np.iinfo(np.int64).max,) * 2]).T
    nearest = np.searchsorted(last, starts, side="right")  # the span that ends after the token begins
    return (ends > starts) & (first[nearest] <= starts)
