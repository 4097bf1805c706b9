"""Versions of torch and transformers: those that are tested, and what is said of others, before either is imported."""

import contextlib
import re
from importlib.metadata import PackageNotFoundError, version

from shardbook.recipe import RecipeError

TESTED = {"torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24")}  # the oldest and the newest of each


def release_of(words: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, which tell releases with other behaviour apart."""
    return tuple(map(int, re.findall(r"\d+", words)[:2]))


def installed_versions() -> dict[str, str]:
    """Returns the versions of TESTED's packages by their metadata; none of one that has none, as where it is built in
    place."""
    versions = dict[str, str]()
    for package in TESTED:
        with contextlib.suppress(PackageNotFoundError):
            if number := version(package):  # None, of an empty METADATA
                versions[package] = number
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


def describe_newer() -> str:
    """Returns words on packages that are newer than those that are tested; empty where none is."""
    newer = [
        f"{package} {installed} (tested: {' to '.join(TESTED[package])})"
        for package, installed in installed_versions().items()
        if release_of(installed) > release_of(TESTED[package][1])
    ]
    return f"newer than tested: {', '.join(newer)}" if newer else ""
