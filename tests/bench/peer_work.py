"""What a step of each contender of bench-peers does, counted and not timed: the same on every machine.

Whoever shares a machine with a benchmark moves its seconds by a tenth, and a loop that copies something it need
not is 2% slower. So the operations of one step are counted: multiply-adds of products, bytes that everything else reads
and writes, bytes that collectives send. Writes docs/benchmarks/work.json, and its table in peers.md.

    make bench-work                                          # some minutes; other work beside it changes nothing
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from page import table
from peer_loops import CONTENDERS
from peer_report import DOCS, OTHER_ROWS, label, shortened
from peers import OPTIM, ROOT, LeftOut, World, facts, finish, model_of, name_models, prepare

KINDS = {
    "products": "TFLOP of products",
    "memory": "GB read and written beside them",
    "sent": "GB sent",
}


def tabulate(data: dict) -> str:
    rows = [
        [label(name), *(f"{row[kind] / (1e12 if kind == 'products' else 1e9):.3f}" for kind in KINDS)]
        if "left_out" not in row
        else [name, f"left out: {row['left_out']}", "", ""]
        for name, row in data["contenders"].items()
    ]
    return table(["contender", *KINDS.values()], rows)


def show(data: dict, folder: Path = DOCS) -> None:
    """Write the table into peers.md, between its marks."""
    page = folder / "peers.md"
    before, _, rest = page.read_text().partition("<!-- counted -->")
    _, _, after = rest.partition("<!-- end of counted -->")
    said = f"A step of one rank, commit {shortened(data['commit'])}, torch {data['torch']}."
    page.write_text(f"{before}<!-- counted -->\n\n{said}\n\n{tabulate(data)}\n\n<!-- end of counted -->{after}")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name holds one of these words")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights")
    parser.add_argument("--site", type=Path, default=ROOT / ".venv" / "peers", help="folder that DeepSpeed is in")
    parser.add_argument("--out", type=Path, help="folder for work.json alone (the repository's data stays as it is)")
    asked = parser.parse_args(words)
    names = [name for name in CONTENDERS if name not in OTHER_ROWS]
    names = [name for name in names if not asked.only or any(word in name for word in asked.only)]
    if not names or ((asked.tiny or asked.only) and not asked.out):
        print(f"--only {asked.only}: a contender, and with --only or --tiny --out too", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    settings = {"ranks": 2, "batch": 4, "length": 128, "dtype": "fp32", "optim": OPTIM, "steps": 3, "counts": True}
    found = {}
    try:
        settings["model"] = str(model_of(folder, asked.tiny))
        prepare(folder, settings)
        for name in names:
            world = World(name, folder, asked.site)
            try:
                for _ in range(settings["steps"] - 1):
                    world.hear()
                    world.step_on()
                world.hear()
                said = world.hear()
                finish(name, said, settings)  # each step has its loss
                found[name] = said[0]["work"]
            except LeftOut as why:
                found[name] = {"left_out": str(why)}
            finally:
                world.end()
            print(name, found[name], flush=True)
    finally:
        shutil.rmtree(folder)
    settings |= name_models(asked.tiny)
    data = {key: value for key, value in facts(asked.site).items() if key not in ("cpu", "cores")}
    data |= {"settings": settings, "contenders": found}
    out = asked.out or DOCS
    out.mkdir(parents=True, exist_ok=True)
    (out / "work.json").write_text(json.dumps(data, indent=1) + "\n")
    if not asked.out:
        show(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
