"""Expert parallel beside zero3 alone and beside transformers' own, in one run: the same mixture of experts, rows and
AdamW, steps in turn, as peers.py has them.

The model is a Qwen3-MoE with random weights, wide enough that products take most of a step; its tokenizer is trained on
the same text. First what a step of each contender does is counted, in a launch that is not timed. All contenders have
the malloc settings of our launcher. Ratios are of seconds of the wall, which whoever shares the machine moves, and of
seconds of the ranks' CPUs, which hold neither others' work nor waiting. Writes docs/benchmarks/experts.json, which
docs/moe.md tells of.

    make bench-experts                                            # a quarter of an hour on two cores
    python tests/bench/expert_peers.py --tiny --rounds 1 --out x  # a tiny model: is everything there? no figures
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from expert_loops import CONTENDERS, RANKS
from peer_loops import full_rows
from peer_report import DOCS, rates
from peers import OPTIM, SAME_MALLOC, LeftOut, World, facts, finish, keep_rows, run_group, write

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 512}
FIRST = "zero3-ep2"  # ratios are of its tokens/s
GROUPS = [  # what stands in memory together, and steps in turn
    [FIRST, "zero3", "transformers, fsdp 2, ep 2"],
    [FIRST, "transformers, fsdp 2", "transformers, tp 2, ep 2"],
]
COUNTED_STEPS = 3


class ExpertWorld(World):
    program = Path(__file__).with_name("expert_loops.py")


def write_model(folder: Path, texts: list[str], shape: dict) -> int:
    """Writes a model of `shape` with random weights and a tokenizer of its vocabulary, trained on `texts`. Returns the
    number of its parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    core, end = Tokenizer(models.BPE()), "<|endoftext|>"
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=shape["vocab_size"], special_tokens=[end], initial_alphabet=sorted(letters), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=end).save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, eos_token_id=0, pad_token_id=0, bos_token_id=None))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def prepare(folder: Path, settings: dict, shape: dict) -> None:
    """Writes the model, and documents of ChitChat that each fill a row."""
    from shardbook.data.chitchat import chitchat_file

    chats = [json.loads(line)["messages"] for line in chitchat_file("chitchat").read_text().splitlines()]
    texts = ["\n".join(message["content"] for message in chat) for chat in chats]
    settings["parameters"] = write_model(folder / "model", texts, shape)
    settings["model"] = settings["model_on_four_ranks"] = str(folder / "model")
    letters, count = 8 * settings["length"], RANKS * settings["batch"] * settings["steps"]  # a token has some four
    joined = "\n".join(texts)
    starts = range(0, len(joined) - letters, letters)
    rows = [{"text": joined[start : start + letters]} for start in starts[:count]]
    assert len(rows) == count, f"{len(rows)} rows of {count}"
    write(folder / "full.jsonl", rows)
    keep_rows(settings, folder, full_rows(settings, folder, "zero3"))


def count_work(names: list[str], folder: Path, settings: dict) -> dict[str, dict]:
    """Returns a row a contender: what rank 0 does in a step, with its payload by operation; losses of the first steps;
    of ours, what the ledger counted in the first step; or `left_out`."""
    settings = settings | {"steps": COUNTED_STEPS, "counts": True}
    (folder / "settings.json").write_text(json.dumps(settings))
    found = {}
    for name in names:
        world = ExpertWorld(name, folder, Path(), SAME_MALLOC)
        try:
            for _ in range(COUNTED_STEPS - 1):
                world.hear()
                world.step_on()
            world.hear()
            said = world.hear()
            row = finish(name, said, settings)
            found[name] = said[0]["work"] | {"losses": row["losses"]}
            found[name] |= {"ledger": said[0]["ledger"]} if "ledger" in said[0] else {}
        except LeftOut as why:
            found[name] = {"left_out": str(why)}
        finally:
            world.end()
        print(name, found[name], flush=True)
        shutil.rmtree(folder / "runs", ignore_errors=True)
    return found


def compare(groups: list[dict], warmup: int, quantity: Callable[[dict, int], list[float]]) -> dict[str, dict]:
    """Returns for each other contender the median and the quartiles, over rounds of all launches, of the `quantity` of
    the first one divided by its own in the same round."""
    ratios = {}
    for name in dict.fromkeys(name for group in groups for name in group if name != FIRST):
        pairs = [
            (group[FIRST], group[name]) for group in groups if all("losses" in group.get(n, {}) for n in (FIRST, name))
        ]
        found = [
            ours / theirs
            for pair in pairs
            for ours, theirs in zip(*(quantity(row, warmup) for row in pair), strict=True)
        ]
        if found:
            low, middle, high = statistics.quantiles(found, n=4, method="inclusive") if found[1:] else found * 3
            ratios[f"{FIRST} / {name}"] = {"median": middle, "quartiles": [low, high]}
    return ratios


def cpu_rates(row: dict, warmup: int) -> list[float]:
    """Useful tokens for each second of all ranks' CPUs, in each step after the first `warmup`: what another program on
    the same cores takes is not in it, and neither is waiting."""
    return [n / seconds for n, seconds in zip(row["useful_tokens"], row["cpu_seconds"], strict=True)][warmup:]


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(loss / other - 1) for loss, other in zip(losses, others, strict=True))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender that count, in each launch")
    parser.add_argument("--launches", type=int, default=1, help="of each group: who has which core and pages is luck")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them, beside the step at the start")
    parser.add_argument("--batch", type=int, default=2, help="rows of a rank in a step")
    parser.add_argument("--only", nargs="+", default=[], help="contenders, by their names")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, only to see that it runs")
    parser.add_argument("--count", action="store_true", help="count alone")
    parser.add_argument("--out", type=Path, help="folder for experts.json alone (the repository's data stays as it is)")
    asked = parser.parse_args(words)
    if (asked.tiny or asked.only or asked.count) and not asked.out:
        print("--tiny, --only and --count need --out: what they give is no data of the repository", file=sys.stderr)
        return 2
    names = asked.only or list(CONTENDERS)
    folder = Path(tempfile.mkdtemp(prefix="experts-"))
    data = facts(folder)  # there is no DeepSpeed in it
    shape = SHAPE | (TINY if asked.tiny else {})
    settings = {
        "ranks": RANKS,
        "batch": asked.batch,
        "length": 512,
        "dtype": "fp32",
        "needed_bytes": 3e9,
        "optim": OPTIM,
        "warmup": asked.warmup,
        "launches": asked.launches,
        "rounds": asked.rounds,
        "steps": max(COUNTED_STEPS, 1 + 2 * (asked.warmup + asked.rounds)),
    }
    try:
        prepare(folder, settings, shape)
        counted = count_work(names, folder, settings)
        (folder / "settings.json").write_text(json.dumps(settings))
        runs, groups = {name for name in names if "left_out" not in counted[name]}, list[dict]()
        for group in GROUPS * (0 if asked.count else asked.launches):
            group = [name for name in group if name in runs]
            if group[1:]:
                groups.append(run_group(group, folder, Path(), settings, SAME_MALLOC, ExpertWorld))
    finally:
        shutil.rmtree(folder)
    ratios = {
        "tokens/s": compare(groups, asked.warmup, rates),
        "tokens/s of CPUs": compare(groups, asked.warmup, cpu_rates),
    }
    for group in groups:
        for row in group.values():
            if "losses" in row and "losses" in group.get(FIRST, {}):
                row["largest_difference"] = largest_difference(row["losses"], group[FIRST]["losses"])
    settings = {key: value for key, value in settings.items() if key != "model_on_four_ranks"} | {"model": shape}
    data |= {"settings": settings}
    data |= {"ratios": ratios, "counted": counted, "groups": groups}
    out = asked.out or DOCS
    out.mkdir(parents=True, exist_ok=True)
    (out / "experts.json").write_text(json.dumps(data, indent=1) + "\n")
    for name, row in counted.items():
        print(f"{name:40}", row.get("left_out") or row)
    for quantity, found in ratios.items():
        for pair, row in found.items():
            low, high = row["quartiles"]
            print(f"{quantity:18} {pair:50} {row['median']:.3f}  ({low:.3f} to {high:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
