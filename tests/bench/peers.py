"""Shardbook beside its peers: the same model, rows and optimizer, steps in turn, in one run.

Every contender is a world of processes of its own, blocked in a read while another one steps; a round is a turn of
each of a group, in an order that changes from round to round, so that what else the machine does hits all alike. A turn
is two steps, and the second is timed: the first brings back what the other's turn, or the kernel meanwhile, took from
caches and memory, which no run that has a machine to itself pays. Groups are what memory holds; ratios are of
contenders of one group. At last the bare loops again, where every contender tells malloc what ours tells it. Writes
docs/benchmarks/peers.json, the table in peers.md and peers.svg.

    make bench-peers                                         # an hour and a half on two cores
    python tests/bench/peers.py --tiny --rounds 2 --out x    # a tiny model: is everything there? no figures
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, distributions, version
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from peer_loops import CONTENDERS, exchanges, full_rows, recipe_words
from peer_report import DOCS, ON_FOUR_RANKS, OURS, PAIRS, TOLERANCE, Group, compare, judge, show

from shardbook.ranks.process_env import malloc_defaults

ROOT = Path(__file__).parents[2]
# what stands in memory together, and steps in turn: each takes 6 to 9 GB, and malloc keeps it between steps
GROUPS = [list(pair) for pair in PAIRS]
RANKS = 2
BLOCKS = 15  # of the model of four ranks: two contenders with all thirty do not fit into 24 GB
EXCHANGES = 6000  # some 400 packed rows
NEEDED_BYTES = {"tiny": 1.5e9, "smollm2": 9e9}  # of the ranks of one contender, all together
SECONDS = 600  # for a step, or for everything before the second one
OPTIM = {"learning_rate": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
PACKAGES = ("transformers", "accelerate")
COUNTS = ("launches", "rounds", "warmup", "batch", "length")  # without which ratios are not of one kind
SAME_MALLOC = malloc_defaults({})  # what our launcher asks of malloc


class LeftOut(Exception):
    """Why a contender has no figures."""


class World:
    """The ranks of one contender."""

    program = Path(__file__).with_name("peer_loops.py")

    def __init__(self, name: str, folder: Path, site: Path, variables: dict[str, str] | None = None):
        from shardbook.ranks.launch import free_port

        ranks = 4 if name in ON_FOUR_RANKS else RANKS
        self.name, self.said = name, [folder / f"{name}.{rank}.txt" for rank in range(ranks)]
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen] = []
        shared = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),  # DeepSpeed's
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        } | (variables or (SAME_MALLOC if name in OURS else {}))
        if name.startswith("DeepSpeed"):  # where it can be imported transformers imports it, in every contender
            paths = [str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            shared |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        for rank in range(ranks):
            here, there = Pipe()
            command = [sys.executable, str(self.program), name, str(folder)]
            with self.said[rank].open("w") as said:
                process = subprocess.Popen(
                    [*command, str(there.fileno())],
                    env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    pass_fds=[there.fileno()],
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def hear(self) -> list:
        """What each rank says next. Raises LeftOut."""
        heard: dict[Connection, object] = {}
        while len(heard) < len(self.pipes):
            ready = wait([pipe for pipe in self.pipes if pipe not in heard], SECONDS)
            if not ready:
                raise LeftOut(f"said nothing for {SECONDS} s")
            for pipe in ready:
                try:
                    heard[pipe] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise LeftOut(self.reason(self.pipes.index(pipe))) from None
        return [heard[pipe] for pipe in self.pipes]

    def step_on(self) -> None:
        """Let all ranks begin their next step."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # `hear` says why
                pipe.send("go")

    def step(self) -> float:
        """One step of all ranks, in seconds of wall time. Raises LeftOut."""
        began = time.perf_counter()
        self.step_on()
        self.hear()
        return time.perf_counter() - began

    def reason(self, rank: int) -> str:
        from gpu import reason

        code = self.processes[rank].wait(30)
        return reason(self.said[rank].read_text(), code)

    def cpu_seconds(self) -> float:
        """Of all threads of its processes."""
        ticks = 0
        for process in self.processes:
            with contextlib.suppress(FileNotFoundError):
                words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def run_group(
    names: list[str],
    folder: Path,
    site: Path,
    settings: dict,
    variables: dict | None = None,
    world_type: type[World] = World,
) -> dict:
    """A row a contender: seconds of the second step of each of its turns, of the wall and of the CPUs, losses of all
    steps; or `left_out`."""
    rows: dict[str, dict] = {}
    worlds: dict[str, World] = {}

    def leave(name: str, why: LeftOut) -> None:
        if world := worlds.pop(name, None):
            world.end()
        rows[name] = {"left_out": str(why)}
        print(f"{name:32} left out: {why}", flush=True)

    try:
        for name in names:
            began, free, needed = time.perf_counter(), free_bytes(), settings["needed_bytes"]
            try:
                if free < needed:  # else the kernel would end one, of whomever
                    raise LeftOut(f"needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free")
                worlds[name], rows[name] = world_type(name, folder, site, variables), new_row()
                worlds[name].hear()
                print(f"{name:32} stands after {time.perf_counter() - began:.0f} s", flush=True)
            except LeftOut as why:
                leave(name, why)
        for round_ in range(settings["warmup"] + settings["rounds"]):
            turn = round_ % len(names)
            for name in [each for each in names[turn:] + names[:turn] if each in worlds]:
                try:
                    worlds[name].step()
                    before = {other: world.cpu_seconds() for other, world in worlds.items()}
                    seconds = worlds[name].step()
                except LeftOut as why:
                    leave(name, why)
                    continue
                rows[name]["seconds"].append(seconds)
                rows[name]["cpu_seconds"].append(worlds[name].cpu_seconds() - before[name])
                print(f"{name:32} round {round_ + 1}: {seconds:.2f} s", flush=True)
                for other, world in worlds.items():
                    if other != name:  # its share of one core while it should be doing nothing
                        idle = (world.cpu_seconds() - before[other]) / seconds
                        rows[other]["idle_share"] = max(rows[other]["idle_share"], idle)
        for name, world in list(worlds.items()):
            try:
                rows[name] |= finish(name, world.hear(), settings)
            except LeftOut as why:
                leave(name, why)
    finally:
        for world in worlds.values():
            world.end()
        shutil.rmtree(folder / "runs", ignore_errors=True)  # the next group's run of this name begins anew
    return rows


def new_row() -> dict:
    return {"seconds": [], "cpu_seconds": [], "idle_share": 0.0}


def free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def finish(name: str, said: list[dict], settings: dict) -> dict:
    """What the ranks of `name` said at their end, as one row. All have as many tokens, so losses are their mean."""
    of_ranks = [rank["losses"] for rank in said if rank["losses"] is not None]  # ours are of all, and rank 0's to say
    losses = [sum(each) / len(each) for each in zip(*of_ranks, strict=True)]
    if len(losses) != settings["steps"]:
        raise LeftOut(f"{len(losses)} losses of {settings['steps']} steps")
    full = RANKS * settings["batch"] * (settings["length"] - 1)  # the first token of a row is not predicted
    useful = said[0].get("trained_tokens", [full] * settings["steps"])
    return {
        "losses": losses,
        "useful_tokens": useful[2::2],  # of the steps that are timed
        "peak_resident_bytes": max(rank["peak_resident_bytes"] for rank in said),
    }


def prepare(folder: Path, settings: dict) -> None:
    """Rows of ChitChat: exchanges, and documents that fill a row; the order in which our loader gives those."""
    from shardbook.data.chitchat import chitchat_file
    from shardbook.data.encoding import load_tokenizer

    tokenizer = load_tokenizer(Path(settings["model"]), "model.path")
    chats = [json.loads(line)["messages"] for line in chitchat_file("chitchat").read_text().splitlines()]
    # no more than is used: a row and its tokens need not be made ten times over
    texts = ["\n".join(message["content"] for message in chat)[: 10 * settings["length"]] for chat in chats]
    texts = [text for text in texts if len(text) == 10 * settings["length"]][: 8 * RANKS * settings["steps"]]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    full = [text for text, length in zip(texts, lengths, strict=True) if length >= settings["length"]]
    pairs = [pair for chat in chats for pair in zip(chat[::2], chat[1::2], strict=False)][:EXCHANGES]
    write(folder / "full.jsonl", [{"text": text} for text in full])
    write(folder / "exchanges.jsonl", [{"prompt": a["content"] + "\n", "completion": b["content"]} for a, b in pairs])
    for rows in (full_rows(settings, folder, "ddp"), exchanges(settings, folder, packing=False)):
        keep_rows(settings, folder, rows)
    settings["model_on_four_ranks"] = str(first_blocks(Path(settings["model"]), folder / "cut"))
    (folder / "settings.json").write_text(json.dumps(settings))


def keep_rows(settings: dict, folder: Path, rows: dict) -> None:
    """Tokenises the documents of `rows`, once for all runs. Where they fill a row, writes rows.pt: what our loader
    gives each rank in each step."""
    import torch

    from shardbook.data.encoding import load_tokenizer
    from shardbook.data.loader import Loader, choose_batching
    from shardbook.data.tokenized import build_documents
    from shardbook.parallel.mesh import DataRank
    from shardbook.recipe import find_recipe, load_recipe

    name, *words = recipe_words(settings, folder, "rows", rows)
    recipe, tokenizer = load_recipe(find_recipe(name), words), load_tokenizer(Path(settings["model"]), "model.path")
    documents, _ = build_documents(recipe.data, tokenizer, Path(settings["model"]))
    if recipe.data.max_length != settings["length"]:
        return
    batchings = [
        choose_batching(recipe.data, recipe.train, DataRank(rank, RANKS), "cpu", documents) for rank in range(RANKS)
    ]
    loaders = [Loader(documents, batching, 1, recipe.train.seed) for batching in batchings]
    steps = [
        [loader.step_at(step * loader.rows_per_step)[0].input_ids for loader in loaders]
        for step in range(settings["steps"])
    ]
    torch.save(torch.stack([torch.cat(step) for step in steps]), folder / "rows.pt")


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_of(folder: Path, tiny: bool) -> Path:
    from shardbook.model.embedded import smollm2_folder

    if not tiny:
        return smollm2_folder()
    sys.path.append(str(ROOT / "tests" / "support"))
    import tiny as small

    return small.write_model(folder / "model", max_position_embeddings=512)


def first_blocks(model: Path, out: Path) -> Path:
    """`model` with its first BLOCKS blocks alone, in `out`; itself where it has no more."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    if whole.config.num_hidden_layers <= BLOCKS:
        return model
    del whole.model.layers[BLOCKS:]
    whole.config.num_hidden_layers = BLOCKS
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))  # its tokenizer
    whole.save_pretrained(out)
    return out


def name_models(tiny: bool) -> dict[str, str]:
    """What the data says in place of their folders."""
    whole = "tiny" if tiny else "SmolLM2-135M-Instruct"
    return {"model": whole, "model_on_four_ranks": whole if tiny else f"{whole}, its first {BLOCKS} blocks"}


def facts(site: Path) -> dict:
    import torch

    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    described = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(described, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = {"commit": commit, "torch": torch.__version__, "cpu": cpu, "cores": os.cpu_count()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {each.name: each.version for each in distributions(name="deepspeed", path=[str(site)])}


def add_to(there: dict, here: dict, measured: list[Group], same: list[Group]) -> tuple[dict, list[Group], list[Group]]:
    """What is `there`, with groups measured here in place of those of the same contenders; the data says which were."""
    counts = [{name: data["settings"][name] for name in COUNTS} for data in (there, here)]
    if counts[0] != counts[1]:
        raise SystemExit(f"--add: peers.json has {counts[0]}, these are {counts[1]}")
    own = [set(group) for group in measured]
    kept = [
        [group for group in groups if set(group) not in own]
        for groups in (there["groups"], there["same_malloc"]["groups"])
    ]
    added = {"contenders": sorted(set().union(*own))} | {key: here[key] for key in ("commit", "torch", "cpu", "cores")}
    others = [each for each in there.get("added", []) if each["contenders"] != added["contenders"]]
    data = there | {"settings": there["settings"] | here["settings"], "added": [*others, added]}
    return data, kept[0] + measured, kept[1] + same


def choose_contenders(group: list[str], only: list[str]) -> list[str]:
    """The contenders of `group` that `only` asks for: all of a pair that is named as in the table, else those whose
    name holds one of the words. Without words all are asked for.
    """
    if not only or " / ".join(group) in only:
        return group
    return [name for name in group if any(word in name for word in only)]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender that count, in each launch")
    parser.add_argument("--launches", type=int, default=2, help="of each group: who has which core and pages is luck")
    parser.add_argument("--warmup", type=int, default=0, help="rounds before them, beside the step at the start")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help='pairs as "ddp / bare DDP", or contenders whose name holds one of these words',
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model with random weights, only to see that it runs"
    )
    parser.add_argument("--site", type=Path, default=ROOT / ".venv" / "peers", help="folder that DeepSpeed is in")
    parser.add_argument("--out", type=Path, help="folder for peers.json alone (the repository's data stays as it is)")
    parser.add_argument("--add", action="store_true", help="groups of --only to what the repository's data has")
    asked = parser.parse_args(words)
    if min(asked.rounds, asked.launches) < 1 or asked.warmup < 0:
        given = f"--rounds {asked.rounds} --launches {asked.launches} --warmup {asked.warmup}"
        print(f"{given}: must be at least 1, 1 and 0", file=sys.stderr)
        return 2
    groups = [choose_contenders(group, asked.only) for group in GROUPS]
    if not any(groups):
        print(f"--only {asked.only}: no contender; there are", *CONTENDERS, sep="\n  ", file=sys.stderr)
        return 2
    if asked.add and (asked.tiny or asked.out or not asked.only):
        print("--add goes with --only, and neither with --tiny nor --out", file=sys.stderr)
        return 2
    if (asked.tiny or (asked.only and not asked.add)) and not asked.out:
        print(
            "--tiny and --only need --out: what they give is no data of the repository (--add: of --only)",
            file=sys.stderr,
        )
        return 2
    folder, before = Path(tempfile.mkdtemp(prefix="peers-")), facts(asked.site)
    try:
        settings = {
            "model": str(model_of(folder, asked.tiny)),
            "ranks": RANKS,
            "batch": 4,
            "length": 128,
            "dtype": "fp32",
            "needed_bytes": NEEDED_BYTES["tiny" if asked.tiny else "smollm2"],
            "optim": OPTIM,
            "warmup": asked.warmup,
            "launches": asked.launches,
            "rounds": asked.rounds,
            "steps": 1 + 2 * (asked.warmup + asked.rounds),
        }
        prepare(folder, settings)
        launched = [group for _ in range(asked.launches) for group in groups if group]
        measured = [run_group(group, folder, asked.site, settings) for group in launched]
        bare = [group for group in groups if len(group) > 1 and any("bare" in name for name in group)]
        same = [run_group(group, folder, asked.site, settings, SAME_MALLOC) for group in bare]
    finally:
        shutil.rmtree(folder)
    settings |= name_models(asked.tiny)
    data = before | {"settings": settings, "tolerance": TOLERANCE}
    out = asked.out or DOCS
    if asked.add:
        data, measured, same = add_to(json.loads((out / "peers.json").read_text()), data, measured, same)
    judged, same = judge(measured), judge(same) if same else []
    ratios, quartiles = compare(judged, asked.warmup)
    again = dict(zip(("ratios", "quartiles"), compare(same, asked.warmup), strict=True))
    data |= {"ratios": ratios, "quartiles": quartiles}
    data |= {"same_malloc": {"variables": SAME_MALLOC} | again | {"groups": same}, "groups": judged}
    out.mkdir(parents=True, exist_ok=True)
    (out / "peers.json").write_text(json.dumps(data, indent=1) + "\n")
    for pair, middle in ratios.items():
        print(f"{pair:48} {middle:.3f}  ({quartiles[pair][0]:.3f} to {quartiles[pair][1]:.3f})")
    for name, row in [pair for group in judged for pair in group.items()]:
        print(
            f"{name:32}", *(f"{key}: {row[key]}" for key in ("left_out", "wrong", "largest_difference") if key in row)
        )
    if not asked.out:
        show(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
