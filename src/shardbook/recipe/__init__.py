"""The recipe: a run described as data, in one flat TOML file, checked by a schema that knows every key.

Imports no torch, so a command line is refused in milliseconds.
"""

from shardbook.recipe.data import Data
from shardbook.recipe.learning import Distill, Lora, Optim, Preference
from shardbook.recipe.load import (
    describe_keys,
    dump_recipe,
    find_recipe,
    first_line,
    flatten_recipe,
    list_recipes,
    load_recipe,
    note_gone,
    parse_recipe,
    resolve_precision,
)
from shardbook.recipe.refusals import Conflict, check_parallel, conflicts, with_settings
from shardbook.recipe.schema import Recipe
from shardbook.recipe.sections import (
    TIERS,
    Activation,
    Generate,
    Model,
    Offload,
    Parallel,
    Precision,
    RecipeError,
    Run,
    Section,
    Train,
    nearest,
)
from shardbook.recipe.stages import STAGES, Stage, find_stage
