"""Functions and classes of the package with others in their place. A test names where one lives; that train.py, or any
other module, imported it by name is no business of the test."""

import sys
from importlib import import_module


def replace(real, planted) -> None:
    """Puts `planted` in the place of `real`, a function or class of the package: where it lives, and wherever it was
    imported by name. `replace(planted, real)` takes that back. Raises AssertionError where `real` is nowhere."""
    import_module("shardbook.train")  # with it those who import by name: one that comes later would be left out
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "shardbook"]
    places = [(module, name) for module in modules for name, value in vars(module).items() if value is real]
    assert places, f"no module of the package has {real}"
    for module, name in places:
        setattr(module, name, planted)
