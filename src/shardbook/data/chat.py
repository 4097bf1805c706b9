"""Chat: one raw row becomes token ids and a loss mask, which marks the tokens that are trained.

The text is rendered once by the tokenizer's own chat template and tokenized once. A token is trained if its characters
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
from shardbook.recipe import RecipeError, first_line, nearest

Spans = list[tuple[int, int]]
Tools = list[Any] | None
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message that hold a thought
OTHER_TEMPLATE = "set data.chat_template to one that does"
# The text between header and answer: Qwen3 writes an empty thought before the last answer. A generation prompt may end
# with one, or with the beginning of a thought.
EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")
PLACEHOLDER = "\u2063placeholder\u2063"  # occurs in no template and no conversation
SHAPES_KEPT = 4096  # entries of the caches by conversations' roles
CHECKED = 16  # messages from the beginning whose headers are each rendered alone
_SPACE = re.compile(r"\s*")


class Encoder:
    """Encodes rows with one tokenizer. Caches how its template writes conversations of the same roles, so that a row of
    n messages is rendered once and not n times. `system`: the system message of conversations without one; `train_on`:
    assistant, last or all; `kwargs`: of the template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system: str = "",
        train_on: str = "assistant",
        kwargs: Mapping[str, Any] | None = None,
    ):
        self.tokenizer, self.system, self.train_on, self.kwargs = tokenizer, system, train_on, kwargs or {}
        self.backend: Any = tokenizer.backend_tokenizer  # called directly: transformers' wrapper costs a tenth more
        self.backend.no_truncation()
        self.backend.no_padding()
        self.roles = {"system", "user", "assistant", "tool"}  # and those that the template names, as they occur
        self.end_of_turn = functools.cache(self._find_end_of_turn)
        self.header = functools.lru_cache(SHAPES_KEPT)(self._render_header)
        self.shape = functools.lru_cache(SHAPES_KEPT)(self._find_shape)

    def encode(self, rows: Sequence[dict[str, Any]], wheres: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns each row's token ids (int64), not truncated, and trained mask (bool). RecipeError names its `where`.

        Conversations: loss on the assistant's tokens; after a prompt, on the completion's. Text: loss on the
        completion, or on all of the text, which ends with the end-of-sequence token.
        """
        rendered = [self._render_row(row, where) for row, where in zip(rows, wheres, strict=True)]
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for special in (False, True):
            if numbers := [number for number, text in enumerate(rendered) if text.special is special]:
                texts = [rendered[number].text for number in numbers]
                encoded = self.backend.encode_batch(texts, add_special_tokens=special)
                for number, each in zip(numbers, encoded, strict=True):
                    found[number] = np.array(each.ids, dtype=np.int64), _mark(each.offsets, rendered[number].spans)
        return [found[number] for number in range(len(rendered))]

    def prompt(self, text: str, where: str) -> list[int]:
        """Returns the token ids that a model reads before it answers `text`; `text`'s own without a chat template."""
        if not self.tokenizer.chat_template:
            return list(self.tokenizer(text)["input_ids"])
        messages = [{"role": "system", "content": self.system}] * bool(self.system)
        rendered = self._render([*messages, {"role": "user", "content": text}], where, add_generation_prompt=True)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _render_row(self, row: dict[str, Any], where: str) -> "Rendered":
        example = read_row(row, where, self.system, self.train_on)
        if isinstance(example, Text):
            text, begin = example.prompt + example.completion + (self.tokenizer.eos_token or ""), len(example.prompt)
            if not example.completion[:1].isspace():  # a token may hold the prompt's last space and the first word
                begin = len(example.prompt.rstrip(" "))
            return Rendered(text, [(begin, len(text))], True)
        messages, trained, tools = example
        for number, message in enumerate(messages):
            if message["role"] not in self.roles:
                self._check_role(message["role"], f"{where}: message {number}")
        text = self._render(messages, where, tools)
        named = {f"the tool {_name(tool)}": _name(tool) for tool in tools or ()}
        for number, message in enumerate(messages):
            named |= {f"{said} in message {number}": name for said, name in _calls(message).items()}
        if unwritten := [said for said, name in named.items() if name not in text]:
            raise RecipeError(f"{where}: the chat template does not write {unwritten[0]}; {OTHER_TEMPLATE}")
        if self.train_on == "all":
            return Rendered(text, [(0, len(text))], False)  # the template writes its own special tokens
        places = self._find_places(messages, text, tools)
        spans = []
        for number in trained:
            if len(messages[number]) > len(PLAIN):
                spans.append(self._whole_span(messages, number, text, tools, where))
            else:
                place = places[number] if places else None
                spans.append(self._answer_span(messages, number, text, place, tools, where))
        return Rendered(text, spans, False)

    def _check_role(self, role: str, where: str) -> None:
        """Raises RecipeError for a role that the template does not name: it would write it as any word, or drop it."""
        if f"'{role}'" not in (template := str(self.tokenizer.chat_template)) and f'"{role}"' not in template:
            meant = OTHER_ROLES.get(role.lower(), "")
            hint = f"; did you mean {meant}?" if meant else nearest(role, sorted(self.roles))
            allowed = f"must be of {', '.join(sorted(self.roles))}, or one that the chat template names"
            raise RecipeError(f"{where} is of role {role!r}: {allowed}{hint}")
        self.roles.add(role)

    def _answer_span(
        self, messages: list[Message], number: int, text: str, place: "MessageSpan | None", tools: Tools, where: str
    ) -> tuple[int, int]:
        """Returns the character span of one answer in `text`: from its header's end to its end-of-turn mark."""
        answer, mark, ends = messages[number]["content"].strip(), self.end_of_turn(), -1
        if place is None:
            header, opening = self._find_header(messages, number, text, tools, where)
            after = _skip_thought(text, header)
            ways = [(header, False), *([(after, True)] if after else [])]
        else:
            header, opening, ways = place.header, place.opening, [(place.content, place.thinks)]
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
        if ends < 0:
            raise RecipeError(_unlike(where, number, self.train_on))
        said = f"the chat template does not end message {number} with {mark!r}, as it ends a last one"
        raise RecipeError(f"{where}: {said}")

    def _whole_span(self, messages: list[Message], number: int, text: str, tools: Tools, where: str) -> tuple[int, int]:
        """Returns the character span of an answer with tool calls or its own thought, as the template writes it."""
        header, opening = self._find_header(messages, number, text, tools, where)
        begin = _skip_thought(text, header) or header + len(opening) * text.startswith(opening, header)
        until = self._render(messages[: number + 1], where, tools).rstrip()
        tail = until[_skip_thought(until, header) or begin :]  # a last message may also have an empty thought
        if not (until.startswith(text[:header]) and text.startswith(tail, begin)):
            raise RecipeError(_unlike(where, number, self.train_on))
        end = begin + len(tail)
        message = messages[number]
        written = _calls(message) | {name: str(message.get(name, "")).strip() for name in THOUGHTS}
        if left := [name for name, said in written.items() if text.find(said, begin, end) < 0]:
            said = f"does not write {left[0]} in message {number}"
            raise RecipeError(f"{where}: the chat template {said}; {OTHER_TEMPLATE}")
        if text.find(message["content"].strip(), header, end) < 0:
            raise RecipeError(_unlike(where, number, self.train_on))
        if not tail.strip().removesuffix(self.end_of_turn()):
            fields = ", ".join(name for name in message if name not in PLAIN)
            said = f"message {number} is empty and the chat template does not write its {fields}"
            raise RecipeError(f"{where}: {said}; {OTHER_TEMPLATE}, or leave the message out")
        return begin, end

    def _find_header(
        self, messages: list[Message], number: int, text: str, tools: Tools, where: str
    ) -> tuple[int, str]:
        """Returns the end of an answer's header in `text`, and the answer's part that a generation prompt writes."""
        alone = self._render_before(messages, number, where, tools)
        header = OPENING.sub("", alone)
        if not text.startswith(header):
            raise RecipeError(_unlike(where, number, self.train_on))
        return len(header), alone[len(header) :]

    def _find_places(self, messages: list[Message], text: str, tools: Tools) -> "list[MessageSpan] | None":
        """Returns each message's place in `text`, or None where the template does not write these messages as it writes
        placeholders of the same roles: then each answer's header is rendered alone."""
        if tools or any(len(message) > len(PLAIN) for message in messages):
            return None
        shape = self.shape(tuple(message["role"] for message in messages))
        if shape is None or not text.startswith(shape[0].header + shape[0].thought):
            return None
        places, at = [], 0
        for (header, thought, opening), (after, more, _), message in zip(shape, shape[1:], messages, strict=False):
            begin = at + len(header)
            at, follows = begin + len(thought), after + more
            places.append(MessageSpan(begin, at, bool(thought), opening))
            content = message["content"]
            if not text.startswith(content + follows, at):
                content = content.strip()
                if not text.startswith(content + follows, at):
                    return None
            at += len(content)
        return places if at + len(shape[-1].header) == len(text) else None

    def _find_shape(self, roles: tuple[str, ...]) -> "list[Before] | None":
        """Returns the text that the template writes before each message of a conversation of `roles`, then the text
        after the last one. None where an answer's header in the conversation differs from the header rendered alone."""
        messages = _placeholders(roles)
        try:
            text = self._render(messages, "")
            shape, at, known = [], 0, dict[tuple[str, tuple[str, ...]], Before]()
            for number, message in enumerate(messages):
                begin = text.find(message["content"], at)
                if begin < 0 or text.find(message["content"], begin + 1) > 0:
                    return None
                before = text[at:begin]
                parts = Before(before)
                if message["role"] == "assistant":
                    # not all headers of a long conversation: a template depends on roles, the beginning and the end
                    place = before, roles[max(0, number - 2) : number]
                    if number < CHECKED or number >= len(roles) - 2 or place not in known:
                        alone = self.header(roles[:number]) if number else before
                        header = OPENING.sub("", alone)
                        thought, opening = text[len(header) : begin], alone[len(header) :]
                        if not (text.startswith(header) and at <= len(header) <= begin):
                            return None
                        if thought and not EMPTY_THOUGHT.fullmatch(thought):
                            return None
                        known[place] = Before(header[at:], thought, opening)
                    parts = known[place]
                shape.append(parts)
                at = begin + len(message["content"])
        except RecipeError:  # the template then refuses the conversation too, and that error is raised
            return None
        return [*shape, Before(text[at:])]

    def _render_header(self, roles: tuple[str, ...]) -> str:
        return self._render_before([*_placeholders(roles), {"role": "assistant", "content": ""}], len(roles), "")

    def _render_before(self, messages: list[Message], number: int, where: str, tools: Tools = None) -> str:
        """Returns the text that the model has read when it begins to write message `number`."""
        if number:
            return self._render(messages[:number], where, tools, add_generation_prompt=True)
        # some templates refuse an empty list: the header of a first answer is the text before its content
        opening = {"role": messages[0]["role"], "content": PLACEHOLDER}
        return self._render([opening, *messages[1:]], where, tools).partition(PLACEHOLDER)[0]

    def _find_end_of_turn(self) -> str:
        """Returns the template's text after an answer, without white space around it, and without an end of sequence
        that only a last answer has."""
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        more = [{"role": "user", "content": "more"}, {"role": "assistant", "content": "last"}]
        texts = (self._render(each, "the chat template") for each in (probe, probe + more))
        mark, earlier = (text.rpartition("answer")[2].strip() for text in texts)
        return mark if earlier.startswith(mark) else mark.removesuffix(self.tokenizer.eos_token or "").rstrip()

    def _render(
        self, messages: list[Message], where: str, tools: Tools = None, add_generation_prompt: bool = False
    ) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **self.kwargs
            )
        except Exception as error:  # jinja's errors, and whatever a template raises by itself
            raise RecipeError(f"{where}: the chat template refuses it ({first_line(error)})") from None
        assert isinstance(rendered, str)
        return rendered


class Before(NamedTuple):
    """The text that a template writes before a message: its header, an empty thought, and the part of the answer that a
    generation prompt writes after the header."""

    header: str
    thought: str = ""
    opening: str = ""


class MessageSpan(NamedTuple):
    """A message's place in a text: its header's end, its content's start, and whether an empty thought is between."""

    header: int
    content: int
    thinks: bool
    opening: str


class Rendered(NamedTuple):
    """The text of a row, the characters of it that are trained, and whether the tokenizer adds its special tokens."""

    text: str
    spans: Spans
    special: bool


def _skip_thought(text: str, at: int) -> int | None:
    """Returns the end of the empty thought that begins at `at`, or None."""
    found = EMPTY_THOUGHT.match(text, at)
    return found.end() if found else None


def _unlike(where: str, number: int, train_on: str) -> str:
    way_out = "set data.chat_template to another" + ", or data.train_on=last" * (train_on != "last")
    return f"{where}: the chat template renders message {number} differently in the conversation than alone; {way_out}"


def _name(tool: dict[str, Any]) -> str:
    return str((tool.get("function") or tool).get("name", ""))


def _calls(message: Message) -> dict[str, str]:
    """Returns the functions that a message calls, by their names in errors. `function_call` is tool_calls' old form."""
    said = {f"the call of {_name(call)}": _name(call) for call in message.get("tool_calls", ())}
    old = message.get("function_call")
    return said | {f"function_call {_name(old)}": _name(old)} if old else said


def _placeholders(roles: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": f"{PLACEHOLDER}{number}."} for number, role in enumerate(roles)]


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
