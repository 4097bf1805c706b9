"""The program of a rank, of a run or an evaluation: it joins the others, does its part, and ends with an exit code."""

from collections.abc import Callable

from shardbook.ranks.distributed import Ranks, broadcast_from_main, start_distributed, stop_distributed, sum_over_ranks
from shardbook.ranks.exits import FAILED, PREEMPTED, WRONG, report_error
from shardbook.ranks.signals import asked_early
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.log.console import Console


def with_ranks(recipe: Recipe, look: Callable[[Ranks], None], story: Callable[[Ranks], int]) -> int:
    """Returns the exit code of `story` on all ranks of a run, once rank 0 has taken a `look` at what the recipe names:
    all ranks raise what that refuses. PREEMPTED where one was asked to stop by then."""
    ranks = start_distributed(recipe.run.lost_seconds, recipe.run.hang_seconds)
    broadcast_from_main(lambda: look(ranks))
    if sum_over_ranks(asked_early())[0]:
        Console(ranks.is_main).print("stopped  before anything was built; run the same command again")
        code = PREEMPTED
    else:
        code = story(ranks)
    stop_distributed(ranks)
    return code


def guard(program: Callable[[], int]) -> int:
    """Returns the exit code of a rank's `program`; of one that fails the code of its error, whose reason is printed."""
    try:
        return program()
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, WRONG if isinstance(error, RecipeError) else FAILED)
