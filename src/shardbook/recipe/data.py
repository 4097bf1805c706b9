"""The data section: sources, their shares, how rows become conversations, and which of their tokens are trained."""

from datetime import date
from typing import Any, Literal

from pydantic import field_validator, model_validator

from shardbook.recipe.sections import Section, key, nearest

FIELDS = ["messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "text"]
FIELDS += ["chosen", "rejected", "system", "tools"]  # of a row of any format
OURS = ["chat_template", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message"]
OURS += [
    "strftime_now",
    "conversation",
    "messages",
    "return_dict",
    "return_tensors",
    "padding",
    "truncation",
    "max_length",
]


class Data(Section):
    train: str | list[str] = key(
        "chitchat",
        "File, pattern, directory, hub id (owner/name:subset:split), chitchat; with a slice, [:9], behind; or a list.",
    )
    weights: list[int | float] = key(
        [], "Share of an epoch's documents for each source of a list in train, [3, 1]; []: each document once."
    )
    columns: dict[str, str] = key(
        {}, 'The column that holds a field, where names differ: {prompt = "question", completion = "answer"}.'
    )
    eval: str | list[str] = key("", "Held-out data, named as in train; empty: see eval_size.")
    eval_size: int | float = key(
        0, "Without eval: rows of train to hold out, a count, or a share below 1 (0: none).", ge=0
    )
    train_on: Literal["assistant", "last", "all"] = key(
        "assistant", "Tokens to train: assistant (all answers), last (the last answer), all (every token)."
    )
    system: str = key("", "System prompt of conversations that have none.")
    chat_template: str = key("", "File of a Jinja chat template, which is exported too; empty: the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] = key({}, "Arguments of the chat template, {enable_thinking = false}.")
    chat_template_date: str = key(
        "", 'Day that a chat template reads (strftime_now), "2026-07-31"; empty: the day on which the run began.'
    )
    max_length: int = key(1024, "Longest sequence in tokens; longer ones are truncated and counted.", ge=2)
    packing: bool = key(
        True, "Put several documents in one row of max_length; attention never crosses from one to another."
    )
    skip_untrainable: bool = key(
        False, "Drop rows left without a trained token by max_length, and pairs with equal answers; print their number."
    )
    num_proc: int = key(1, "Processes that tokenise.", ge=1)

    @field_validator("chat_template_date", mode="before")
    @classmethod
    def read_day(cls, day: Any) -> Any:
        if type(day) is date:  # as TOML reads it without quotes
            return day.isoformat()
        if isinstance(day, str) and day:
            try:
                return date.fromisoformat(day).isoformat()
            except ValueError:
                raise ValueError(f"{day!r} is no day; it must be as 2026-07-31") from None
        return day

    @model_validator(mode="after")
    def validate_keys(self) -> "Data":
        if self.eval and self.eval_size:
            both = f"eval = {self.eval!r} and eval_size = {self.eval_size}"
            raise ValueError(f"{both}: set one of the two, the other to data.eval_size=0 or data.eval=''")
        if self.eval_size != int(self.eval_size) and self.eval_size > 1:
            raise ValueError(f"eval_size = {self.eval_size}: a count of rows is a whole number, a share is below 1")
        sources = self.train if isinstance(self.train, list) else [self.train]
        if self.weights and (len(self.weights) != len(sources) or len(sources) == 1):
            count = f"{len(sources)} source{'s' * (len(sources) != 1)}"
            raise ValueError(f"weights = {self.weights}: needs one for each source of a list in train; it has {count}")
        if unknown := [field for field in self.columns if field not in FIELDS]:
            reason = f"{unknown[0]} is not a field of a row (the name on the left); {', '.join(FIELDS)} are"
            raise ValueError(f"columns = {self.columns}: {reason}{nearest(unknown[0], FIELDS)}")
        if len(set(self.columns.values())) < len(self.columns):
            raise ValueError(f"columns = {self.columns}: each column can be one field only")
        if any(weight <= 0 for weight in self.weights):
            raise ValueError(f"weights = {self.weights}: each must be above 0; leave a source out of train instead")
        if taken := [name for name in self.chat_template_kwargs if name in OURS]:
            raise ValueError(f"chat_template_kwargs = {self.chat_template_kwargs}: {taken[0]} is set by the run itself")
        return self
