"""Versions of torch and transformers: those that are tested, and what is said of others, before either is imported."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

from shardbook.recipe import RecipeError

RANKS = ("shardbook.train", "shardbook.evaluate")  # the modules that are a rank, as `python -m` names them
TESTED = {"torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24")}  # the oldest and the newest of each


def release_of(words: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, which tell releases with other behaviour apart."""
    return tuple(map(int, re.findall(r"\d+", words)[:2]))


def installed_versions() -> dict[str, str]:
    """Returns the versions of TESTED's packages by their metadata; none of one that has none, as where it is built in
    place."""
    versions = dict[str, str]()
    for package in TESTED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def check_versions() -> None:
    """Raises RecipeError where a package is older than those that are tested."""
    for package, installed in installed_versions().items():
        oldest, newest = TESTED[package]
        if release_of(installed) < release_of(oldest):
            raise RecipeError(
                f"{package} {installed} is older than Shardbook runs on; it is tested with {oldest} to {newest}: "
                f"pip install --upgrade '{package}>={oldest}'"
            )


def refuse_early() -> None:
    """Ends this process with that line and exit code 2 where it is a rank: what it would import next may fail first, in
    words of its own."""
    if not any(("-m", module) in pairwise(sys.orig_argv) for module in RANKS):
        return
    try:
        check_versions()
    except RecipeError as error:
        print(f"shardbook: {error}", file=sys.stderr)
        sys.exit(2)


def describe_newer() -> str:
    """Returns words on packages that are newer than those that are tested; empty where none is."""
    newer = [
        f"{package} {installed} (tested: {' to '.join(TESTED[package])})"
        for package, installed in installed_versions().items()
        if release_of(installed) > release_of(TESTED[package][1])
    ]
    return f"newer than tested: {', '.join(newer)}" if newer else ""
