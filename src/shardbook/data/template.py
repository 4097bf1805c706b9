"""Template: how one tokenizer's chat template writes conversations.

Invariant: nothing here is known of a template but what it writes.
"""

import functools
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardbook.data.formats import Message
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
