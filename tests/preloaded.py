"""What is imported, and read, by the server that ranks are forked from, once for all of them."""

import gc
from importlib import import_module

gc.disable()  # it would look through all of torch again and again: a quarter of the time
for name in (
    "datasets",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "shardbook.cli",
    "shardbook.train",
):
    import_module(name)
import_module("shardbook.run.directory").environment()
# all families' renamings, made at the first question: a fifth of a second
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
# else each rank's first collection writes to every object that is there, which copies its page: a fifth of a second
gc.collect()
gc.freeze()
gc.enable()
