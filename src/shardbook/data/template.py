"""Template: how one tokenizer's chat template writes conversations, and where in the text it writes each message.

Invariant: nothing here is known of a template but what it writes. What it writes around messages is kept for
conversations of the same roles, so that a row of n messages is rendered once and not n times.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from shardbook.data.formats import PLAIN, Message
from shardbook.recipe import RecipeError, first_line

Tools = list[Any] | None
# The text between header and answer: Qwen3 writes an empty thought before the last answer. A generation prompt may end
# with one, or with the beginning of a thought.
EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")
TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # marks what the assistant writes
CLOCK = "strftime_now"  # the function by which templates read the time
DIRECTIVES = [f"%{letter}" for letter in "aAbBcCdDeFgGhHIjklmMnprRsStTuUVwWxXyYzZf"]
DIRECTIVES += [f"%-{letter}" for letter in "dHIjlmMSUWy"]
PLACEHOLDER = "\u2063placeholder\u2063"  # occurs in no template and no conversation
SHAPES_KEPT = 4096  # entries of the caches by conversations' roles
CHECKED = 16  # messages from the beginning whose headers are each rendered alone


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


class ChatTemplate:
    """The chat template of one tokenizer. `kwargs`: arguments of the template; `clock`: the time that it reads, in the
    form of ISO 8601; empty: that of now."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None, clock: str = ""
    ) -> None:
        self.tokenizer, self.kwargs = tokenizer, kwargs or {}
        self.clock = _stopped_clock(clock) if clock else ""
        self.source = str(tokenizer.chat_template or "")
        self.reads_clock = CLOCK in self.source
        self.is_tagged = bool(TAG.search(self.source))
        self.end_of_turn = functools.cache(self._find_end_of_turn)
        self.header = functools.lru_cache(SHAPES_KEPT)(self._render_header)
        self.shape = functools.lru_cache(SHAPES_KEPT)(self._find_shape)

    def render(
        self, messages: list[Message], where: str, tools: Tools = None, add_generation_prompt: bool = False
    ) -> str:
        rendered = self.apply(messages, where, tools, tokenize=False, add_generation_prompt=add_generation_prompt)
        assert isinstance(rendered, str)
        return rendered

    def apply(self, messages: list[Message], where: str, tools: Tools, **how: Any) -> Any:
        try:
            how |= {"chat_template": self.clock + self.tokenizer.get_chat_template(None, tools)} if self.clock else {}
            return self.tokenizer.apply_chat_template(messages, tools=tools, **how, **self.kwargs)
        except Exception as error:  # jinja's errors, and whatever a template raises by itself
            raise RecipeError(f"{where}: the chat template refuses it ({first_line(error)})") from None

    def render_before(self, messages: list[Message], number: int, where: str, tools: Tools = None) -> str:
        """Returns the text that the model has read when it begins to write message `number`."""
        if number:
            return self.render(messages[:number], where, tools, add_generation_prompt=True)
        # some templates refuse an empty list: the header of a first answer is the text before its content
        opening = {"role": messages[0]["role"], "content": PLACEHOLDER}
        return self.render([opening, *messages[1:]], where, tools).partition(PLACEHOLDER)[0]

    def find_places(self, messages: list[Message], text: str, tools: Tools) -> list[MessageSpan] | None:
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

    def _find_shape(self, roles: tuple[str, ...]) -> list[Before] | None:
        """Returns the text that the template writes before each message of a conversation of `roles`, then the text
        after the last one. None where an answer's header in the conversation differs from the header rendered alone."""
        messages = _placeholders(roles)
        try:
            text = self.render(messages, "")
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
        return self.render_before([*_placeholders(roles), {"role": "assistant", "content": ""}], len(roles), "")

    def _find_end_of_turn(self) -> str:
        """Returns the template's text after an answer, without white space around it, and without an end of sequence
        that only a last answer has."""
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        more = [{"role": "user", "content": "more"}, {"role": "assistant", "content": "last"}]
        texts = (self.render(each, "the chat template") for each in (probe, probe + more))
        mark, earlier = (text.rpartition("answer")[2].strip() for text in texts)
        return mark if earlier.startswith(mark) else mark.removesuffix(self.tokenizer.eos_token or "").rstrip()


def _stopped_clock(clock: str) -> str:
    """Returns the beginning of a template that reads `clock` in place of the time of now: transformers lets no function
    through to a template, but a template may have its own. White space of what follows stays as it is."""
    day, percent = datetime.fromisoformat(clock), "\ue000"
    read = f"format | replace('%%', '{percent}')"
    for directive in DIRECTIVES:
        read += f" | replace('{directive}', '{day.strftime(directive)}')"
    return f"{{% macro {CLOCK}(format) %}}{{{{ {read} | replace('{percent}', '%') }}}}{{% endmacro %}}\n"


def _placeholders(roles: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": f"{PLACEHOLDER}{number}."} for number, role in enumerate(roles)]
