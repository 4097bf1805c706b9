"""What is imported, read, checked and measured by the server that ranks are forked from, once for all of them."""

import gc
import os
import tempfile
from importlib import import_module
from pathlib import Path

from budget import count_in_forks
from watcher import dump_on_signal, end_with_parent

end_with_parent()  # a rank that is stopped holds the pipe whose end would end this process
for call in (dump_on_signal, end_with_parent):  # in each process that is forked from this one
    os.register_at_fork(after_in_child=call)

gc.disable()  # it would look through all of torch again and again: a quarter of the time
for name in (
    "cases",
    "datasets",
    "pytest",
    "tiny",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "shardbook.cli",
    "shardbook.train",
):
    import_module(name)
# all families' renamings, made at the first question: a fifth of a second
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def know_tiny_models() -> None:
    """Checks the families of the tiny models, and measures their blocks as most worlds need them: half of what a rank
    of a short run computes. Whoever asks for others measures them."""
    import torch
    from tiny import write_all, write_recipe

    from shardbook.parallel.placement import World
    from shardbook.plan.peak import predict_peak
    from shardbook.recipe import load_recipe
    from shardbook.run.prepare import place_run

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        write_all(Path(made))
        recipe = write_recipe(Path(made), Path(made) / "runs")
        for model in ("model", "untied"):
            for kind in ("none", "full"):
                words = (f"model.path={made}/{model}", f"activation.checkpointing={kind}")
                laid = place_run(load_recipe(recipe, words), World(1, 1, 0, torch.device("cpu")))
                predict_peak(laid.layout, laid.config, laid.recipe)


# With a GPU nothing here may ask CUDA (a rank that is forked after such a question cannot start it), and a backward
# starts threads, after which a fork can have no backward of its own.
if not Path("/dev/nvidiactl").exists():
    import_module("shardbook.run.directory").environment()
    know_tiny_models()
# else each rank's first collection writes to every object that is there, which copies its page: a fifth of a second
count_in_forks()
gc.freeze()
gc.enable()
