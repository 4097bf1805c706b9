"""Chat: one raw row becomes token ids and a loss mask, which marks the tokens that are trained.

The text is rendered by the tokenizer's own chat template and tokenized once; what stands before an answer is rendered
alone, which shows where the answer begins. A token is trained if its characters
lie inside an assistant's answer, its end-of-turn mark included; the generation prompt, and an empty thought that the
template puts before the answer, are not trained. Invariant: the ids are exactly those of the rendered conversation, so
training sees the same tokens as inference.
"""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardbook.data.formats import OTHER_ROLES, PLAIN, Message, Text, read_row
from shardbook.data.probe import THOUGHTS, calls_of, split_thought
from shardbook.data.template import EMPTY_THOUGHT, OPENING, ChatTemplate, Tools
from shardbook.data.written import OTHER_TEMPLATE, Written, check_media
from shardbook.recipe import RecipeError, nearest

Spans = list[tuple[int, int]]
_SPACE = re.compile(r"\s*")


class Encoder:
    """Encodes rows with one tokenizer. `system`: the system message of conversations without one; `train_on`:
    assistant, last or all; `kwargs` and `clock`: as of ChatTemplate."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system: str = "",
        train_on: str = "assistant",
        kwargs: Mapping[str, Any] | None = None,
        clock: str = "",
    ):
        self.tokenizer, self.system, self.train_on = tokenizer, system, train_on
        self.template = ChatTemplate(tokenizer, kwargs, clock)
        self.written = Written(self.template.source, lambda messages, tools: self.template.render(messages, "", tools))
        self.backend: Any = tokenizer.backend_tokenizer  # called directly: transformers' wrapper costs a tenth more
        self.backend.no_truncation()
        self.backend.no_padding()
        self.roles = {"system", "user", "assistant", "tool"}  # and those that the template names, as they occur

    def encode(self, rows: Sequence[dict[str, Any]], wheres: Sequence[str]) -> "list[Encoded]":
        """Returns each row's tokens, not truncated. RecipeError names its `where`.

        Conversations: loss on the assistant's tokens; after a prompt, on the completion's. Text: loss on the
        completion, or on all of the text, which ends with the end-of-sequence token.
        """
        rendered = [self._render_row(row, where) for row, where in zip(rows, wheres, strict=True)]
        encoded = {number: each for number, each in enumerate(rendered) if isinstance(each, Encoded)}
        texts = {number: each for number, each in enumerate(rendered) if isinstance(each, Rendered)}
        for special in (False, True):
            some = {number: each for number, each in texts.items() if each.special is special}
            if some:
                tokens = self.backend.encode_batch([each.text for each in some.values()], add_special_tokens=special)
                for (number, each), token in zip(some.items(), tokens, strict=True):
                    ids, mask = np.array(token.ids, dtype=np.int64), _mark(token.offsets, each.spans)
                    kept = self._once(each.text) if special else slice(None)
                    encoded[number] = Encoded(ids[kept], mask[kept], each.unread)
        return [encoded[number] for number in range(len(rows))]

    def prompt(self, text: str, where: str) -> list[int]:
        """Returns the token ids that a model reads before it answers `text`; `text`'s own without a chat template."""
        if not self.template.source:
            return list(self.backend.encode(text, add_special_tokens=True).ids[self._once(text)])
        messages = [{"role": "system", "content": self.system}] * bool(self.system)
        rendered = self.template.render(
            [*messages, {"role": "user", "content": text}], where, add_generation_prompt=True
        )
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _once(self, text: str) -> slice:
        """Returns which of a text's tokens are kept of those that the tokenizer gives, its special tokens among them:
        not the ones before the text where it begins with them itself, nor an end of sequence after it, which texts end
        with where they should."""
        before, after = self.special
        begin = len(before) if before and text.startswith("".join(before)) else 0
        return slice(begin, -len(after) if after[:1] == [self.tokenizer.eos_token] else None)

    @functools.cached_property
    def special(self) -> tuple[list[str], list[str]]:
        """The tokens that the tokenizer puts before each text, and those that it puts after."""
        word, every = (self.backend.encode("a", add_special_tokens=special).tokens for special in (False, True))
        at = next(at for at in range(len(every)) if every[at : at + len(word)] == word)
        return every[:at], every[at + len(word) :]

    def _render_row(self, row: dict[str, Any], where: str) -> "Rendered | Encoded":
        example = read_row(row, where, self.system, self.train_on)
        if isinstance(example, Text):
            return self._render_text(example)
        messages, trained, tools = example
        check_media(messages, where)
        for number, message in enumerate(messages):
            if message["role"] not in self.roles:
                self._check_role(message["role"], f"{where}: message {number}")
        text = self.template.render(messages, where, tools)
        unread = tuple(self.written.check(messages, tools, text, where))
        if self.template.is_tagged and self.train_on != "all":
            return self._encode_tagged(messages, trained, text, tools, where, unread)
        if self.train_on == "all":  # the template writes its own special tokens
            return Rendered(text, [(0, len(text))], False, unread)
        spans = []
        for number in trained:
            find_span = self._whole_span if len(messages[number]) > len(PLAIN) else self._answer_span
            spans.append(find_span(messages, number, text, tools, where))
        return Rendered(text, spans, False, unread)

    def _render_text(self, example: Text) -> "Rendered":
        """Returns text that ends with the end of sequence once, also where a template has rendered it before."""
        text, begin = example.prompt + example.completion, len(example.prompt)
        end = self.tokenizer.eos_token or ""
        if not text.rstrip().endswith(end):
            text += end
        if not example.completion[:1].isspace():  # a token may hold the prompt's last space and the first word
            begin = len(example.prompt.rstrip(" "))
        return Rendered(text, [(begin, len(text))], True)

    def _encode_tagged(
        self, messages: list[Message], trained: list[int], text: str, tools: Tools, where: str, unread: tuple[str, ...]
    ) -> "Encoded":
        """Returns a conversation whose trained tokens are those that its template marks ({% generation %}), as
        transformers finds them. Where not all answers are trained, those of the others are taken out."""
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        tokens = self.template.apply(messages, where, tools, **how)
        ids, mask = np.array(tokens["input_ids"], dtype=np.int64), np.array(tokens["assistant_masks"], dtype=bool)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        some = [
            number for number in answers if messages[number]["content"].strip() or len(messages[number]) > len(PLAIN)
        ]
        if trained != some:
            begins = np.array([start for start, _ in self.backend.encode(text, add_special_tokens=False).offsets])
            kept = np.zeros_like(mask)
            for number in trained:
                begin, end = (self._boundary(messages, at, text, tools, where) for at in (number, number + 1))
                inside = mask & (begins >= begin) & (begins < end)
                if not inside.any():
                    reason = f"marks nothing of message {number} ({{% generation %}}), which is to be trained"
                    raise RecipeError(f"{where}: the chat template {reason}; {OTHER_TEMPLATE}")
                kept |= inside
            mask = kept
        if not mask.any():
            raise RecipeError(f"{where}: the chat template marks nothing of it ({{% generation %}}); {OTHER_TEMPLATE}")
        return Encoded(ids, mask, unread)

    def _boundary(self, messages: list[Message], number: int, text: str, tools: Tools, where: str) -> int:
        """Returns the place in `text` where message `number` begins, its header included."""
        if number in (0, len(messages)):
            return len(text) if number else 0
        before = self.template.render(messages[:number], where, tools)
        for end in (before, before.rstrip(), before.rstrip().removesuffix(self.tokenizer.eos_token or "").rstrip()):
            if text.startswith(end):
                return len(end)
        raise RecipeError(_unlike(where, number - 1, messages))

    def _check_role(self, role: str, where: str) -> None:
        """Raises RecipeError for a role that the template does not name: it would write it as any word, or drop it."""
        if f"'{role}'" not in (template := self.template.source) and f'"{role}"' not in template:
            meant = OTHER_ROLES.get(role.lower(), "")
            hint = f"; did you mean {meant}?" if meant else nearest(role, sorted(self.roles))
            allowed = f"must be of {', '.join(sorted(self.roles))}, or one that the chat template names"
            raise RecipeError(f"{where} is of role {role!r}: {allowed}{hint}")
        self.roles.add(role)

    def _answer_span(
        self, messages: list[Message], number: int, text: str, tools: Tools, where: str
    ) -> tuple[int, int]:
        """Returns the character span of one answer in `text`: from its header's end to its end-of-turn mark."""
        answer, mark, ends = messages[number]["content"].strip(), self.template.end_of_turn(), -1
        header, opening = self._find_header(messages, number, text, tools, where)
        thought = _skip_thought(text, header)
        ways = [(header, False), *([(thought, True)] if thought else [])]
        for at, thinks in ways:
            start = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if not text.startswith(answer, start):
                continue
            ends = start + len(answer)
            # the answer's trailing whitespace, stripped here and perhaps kept by the template, is before the mark
            after = _SPACE.match(text, ends).end()  # type: ignore[union-attr]
            if text.startswith(mark, after):
                opened = len(opening) if text.startswith(opening, header) else 0
                return start if thinks else header + opened, after + len(mark) if mark else ends
        if ends < 0:  # the template may write a thought with other white space, or name a channel
            return self._whole_span(messages, number, text, tools, where)
        reason = f"the chat template does not end message {number} with {mark!r}, as it ends a last one"
        raise RecipeError(f"{where}: {reason}")

    def _whole_span(self, messages: list[Message], number: int, text: str, tools: Tools, where: str) -> tuple[int, int]:
        """Returns the character span of an answer with tool calls or its own thought, as the template writes it."""
        header, opening = self._find_header(messages, number, text, tools, where)
        begin = _skip_thought(text, header) or header + len(opening) * text.startswith(opening, header)
        until = self.template.render(messages[: number + 1], where, tools).rstrip()
        tail = until[_skip_thought(until, header) or begin :]  # a last message may also have an empty thought
        if not (until.startswith(text[:header]) and text.startswith(tail, begin)):
            raise RecipeError(_unlike(where, number, messages))
        end = begin + len(tail)
        message = messages[number]
        written = [(what, function["name"]) for what, function in calls_of(message)]
        written += [(name, str(message.get(name, "")).strip()) for name in THOUGHTS]
        if left := [what for what, value in written if text.find(value, begin, end) < 0]:
            reason = f"does not write {left[0]} in message {number}"
            raise RecipeError(f"{where}: the chat template {reason}; {OTHER_TEMPLATE}")
        if any(text.find(part, header, end) < 0 for part in split_thought(message)):
            raise RecipeError(_unlike(where, number, messages))
        if not tail.strip().removesuffix(self.template.end_of_turn()):
            fields = ", ".join(name for name in message if name not in PLAIN)
            reason = f"message {number} is empty and the chat template does not write its {fields}"
            raise RecipeError(f"{where}: {reason}; {OTHER_TEMPLATE}, or leave the message out")
        return begin, end

    def _find_header(
        self, messages: list[Message], number: int, text: str, tools: Tools, where: str
    ) -> tuple[int, str]:
        """Returns the end of an answer's header in `text`, and the answer's part that a generation prompt writes."""
        alone = self.template.render_before(messages, number, where, tools)
        header = OPENING.sub("", alone)
        if not text.startswith(header):
            raise RecipeError(_unlike(where, number, messages))
        return len(header), alone[len(header) :]


class Encoded(NamedTuple):
    """A row's token ids (int64), which of them are trained (bool), and the fields of its messages that are not read."""

    ids: np.ndarray
    mask: np.ndarray
    unread: tuple[str, ...] = ()


class Rendered(NamedTuple):
    """The text of a row, the characters of it that are trained, and whether the tokenizer adds its special tokens."""

    text: str
    spans: Spans
    special: bool
    unread: tuple[str, ...] = ()


def _skip_thought(text: str, at: int) -> int | None:
    """Returns the end of the empty thought that begins at `at`, or None."""
    thought = EMPTY_THOUGHT.match(text, at)
    return thought.end() if thought else None


def _unlike(where: str, number: int, messages: list[Message]) -> str:
    is_last = not any(message["role"] == "assistant" for message in messages[number + 1 :])
    way_out = "set data.chat_template to another" + ", or data.train_on=last" * (not is_last)
    return f"{where}: the chat template renders message {number} differently in the conversation than alone; {way_out}"


def _mark(offsets: list[tuple[int, int]], spans: Spans) -> np.ndarray:
    """Returns a bool for each token: whether it begins inside one of `spans`, which are sorted and disjoint. A token
    that begins before its span belongs to the header. The offsets (0, 0) are a special token that the tokenizer added;
    other empty offsets are a space that its post-processor trims, which begins before them."""
    flat = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets))  # 3 times as fast as array
    starts, ends = flat[::2], flat[1::2]
    halves = 2 * starts - (starts == ends)
    first, last = 2 * np.array([*spans, (np.iinfo(np.int64).max // 2,) * 2]).T
    nearest = np.searchsorted(last, halves, side="right")  # the span that ends after the token begins
    return first[nearest] <= halves
