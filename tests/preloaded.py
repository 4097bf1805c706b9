"""What is imported by the server that ranks are forked from, once for all of them."""

import gc
from importlib import import_module

for name in (
    "datasets",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "shardbook.cli",
    "shardbook.train",
):
    import_module(name)
# else each rank's first collection writes to every object that is there, which copies its page: a fifth of a second
gc.collect()
gc.freeze()
