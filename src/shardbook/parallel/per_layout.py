"""A cache holds what functions compute of a layout: a plan asks for one value thousands of times."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from shardbook.parallel.layout import Layout

Answer = TypeVar("Answer")
More = ParamSpec("More")


def cached_per_layout(
    function: Callable[Concatenate[Layout, More], Answer],
) -> Callable[Concatenate[Layout, More], Answer]:
    """Makes `function` compute once what it returns of a layout and other arguments, which can be hashed."""

    @wraps(function)
    def cached(layout: Layout, /, *more: More.args, **named: More.kwargs) -> Answer:
        if (key := (function, more, *named.items())) not in layout.cache:
            layout.cache[key] = function(layout, *more, **named)
        return layout.cache[key]

    return cached
