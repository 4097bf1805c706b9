"""The addresses in a wheel's metadata: those of the repository that it was built from; none where it has no address.

Invariant: no account's name or token that stands in a remote's address is written.
"""

import os
import re
import subprocess

from hatchling.metadata.plugin.interface import MetadataHookInterface


def read_remote(root: str) -> str:
    """Returns the address of the repository at `root`: that of its action, else of its origin, else an empty string."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    try:
        command = ["git", "-C", root, "remote", "get-url", "origin"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def addresses(remote: str) -> dict[str, str]:
    """Returns the project's addresses for a remote like `git@host:owner/name.git`; none for a path."""
    found = re.fullmatch(r"(?:(?:https|ssh|git)://)?(?:[^@/]*@)?([\w.-]+\.\w+)(?::\d+)?[:/](.+?)(?:\.git)?/?", remote)
    if not found:
        return {}
    home = f"https://{found[1]}/{found[2]}"
    pages = {"Documentation": "tree/main/docs", "Issues": "issues", "Changelog": "blob/main/CHANGELOG.md"}
    return {"Source": home} | {name: f"{home}/{page}" for name, page in pages.items()}


class Addresses(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        metadata["urls"] = addresses(read_remote(self.root))
