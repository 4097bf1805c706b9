"""Formats: what people's rows look like, as what chat.py encodes. Knows nothing of tokens.

Invariant: nothing of a row is lost in silence: what is in no known place is an error that names it.
"""

from itertools import takewhile
from typing import Any

from shardbook.recipe import RecipeError

Row = dict[str, Any]


def split_pair(row: Row, where: str) -> list[Row]:
    """A preference as two rows of `prompt` and `completion`, the chosen first. `chosen` and `rejected` are text behind
    a text `prompt`, or messages; those may begin with the prompt, which is then what both begin with."""
    prompt, chosen, rejected = (row.get(key) for key in ("prompt", "chosen", "rejected"))
    match prompt, chosen, rejected:
        case str(), str(), str():
            sides = [chosen, rejected]
        case _, list(), list():
            chosen, rejected = [_plain(message) for message in chosen], [_plain(message) for message in rejected]
            shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
            if isinstance(prompt, str) and shared == 0:
                prompt = [{"role": "user", "content": prompt}]
            elif isinstance(prompt, list) and chosen[: len(prompt)] != [_plain(message) for message in prompt]:
                shared = 0
            else:
                prompt = chosen[:shared]
            sides = [chosen[shared:], rejected[shared:]]
        case _:
            fields = ", ".join(name for name, value in row.items() if value is not None)
            raise RecipeError(
                f"{where}: has the fields {fields or 'none'}; a preference needs prompt, chosen and rejected, as text "
                "or as messages"
            )
    if sides[0] == sides[1]:
        raise RecipeError(f"{where}: chosen and rejected are the same")
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if not side:
            raise RecipeError(f"{where}: {name} adds nothing to the prompt")
    return [{"prompt": prompt, "completion": side} for side in sides]


def _plain(message: Any) -> Any:
    """A message without the keys that `datasets` adds where other rows have them."""
    return {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message
