"""The context around a block's calls, in which its input is offloaded."""

import contextlib
from functools import partial

from model_numbers import gradients, load, micro
from tiny import write_model

from shardbook.memory.block_inputs import call_inside


def test_each_block_runs_once_in_order_inside_what_is_around_it(tmp_path):
    model, seen = load(write_model(tmp_path, num_hidden_layers=5)), []

    @contextlib.contextmanager
    def around(number, hidden):
        seen.append((number, tuple(hidden.shape)))
        yield
        seen.append("done")

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_: seen.append("block"))
        call_inside(block, partial(around, number))
    batch = micro(True)
    gradients(model, batch)
    shape = (*batch.input_ids.shape, 32)
    assert seen == [word for number in range(len(model.blocks)) for word in ((number, shape), "block", "done")]
    assert len({type(block) for block in model.blocks}) == 1, "torch.compile makes a graph for each class"
