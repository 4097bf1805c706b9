"""Marks that a model leaves on its modules, by which a stage knows how to treat their parameters."""

from torch import nn

NOT_STORED = "teacher."  # names that begin so are of no parameter of the model's own files and checkpoints

# the module is reached by no backward: it is RESHARDED after its forward, or GATHERED until the pass ends
FORWARD_ONLY = "forward_only"
RESHARDED, GATHERED = "resharded", "gathered"
STACKED = "stacked"  # the shapes of its parameters that are stacks of matrices, by name (experts.py)
BYTES = "holds_bytes"  # the names of its parameters whose elements are bytes, not numbers (nf4.py)
STANDS_FOR = "stands_for"  # of its packed parameters, by name: how many elements of the model they stand for (nf4.py)


def packed_numel(model: nn.Module) -> dict[nn.Parameter, int]:
    """Returns of each packed parameter in `model` the elements that it stands for."""
    packed = ((dict(each.named_parameters(recurse=False)), getattr(each, STANDS_FOR, {})) for each in model.modules())
    return {parameters[name]: count for parameters, counts in packed for name, count in counts.items()}
