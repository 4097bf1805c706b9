"""Two nodes on one machine: network namespaces with a host name each and a veth pair between them. Needs root, and
iproute2's ip and tc."""

import os
import shutil
import subprocess
from pathlib import Path

SPACES = ("shardbook-node-0", "shardbook-node-1")
HOSTS = ("node-0", "node-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def why_not() -> str:
    """What is missing to build them; empty where nothing is."""
    if absent := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"{' and '.join(absent)} not found (Debian: iproute2)"
    return "" if os.geteuid() == 0 else "it makes network namespaces"


def build_link() -> None:
    remove_link()
    for space in SPACES:
        etc = Path("/etc/netns") / space  # what a process in the namespace finds in /etc
        etc.mkdir(parents=True, exist_ok=True)
        named = (f"{address} {host}\n" for address, host in zip(ADDRESSES, HOSTS, strict=True))
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(named))
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "up")
    _ip("link", "add", "link0", "netns", SPACES[0], "type", "veth", "peer", "name", "link1", "netns", SPACES[1])
    for node, space in enumerate(SPACES):
        _ip("-n", space, "address", "add", f"{ADDRESSES[node]}/24", "dev", f"link{node}")
        set_link(node, up=True)


def remove_link() -> None:
    for space in SPACES:
        subprocess.run(["ip", "netns", "delete", space], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def set_link(node: int, up: bool) -> None:
    """Down: what `node` sends is lost and nothing reaches it; no connection is closed."""
    _ip("-n", SPACES[node], "link", "set", f"link{node}", "up" if up else "down")


def on_node(node: int, *words: str) -> list[str]:
    """The command line `words` on that node, as the same process."""
    named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', HOSTS[node])
    return ["ip", "netns", "exec", SPACES[node], *named, *words]


def pids_on(node: int) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", SPACES[node]], check=True, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
