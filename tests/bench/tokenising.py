"""Rows to tokens and rows of packed documents, with one process and with two: ChitChat, four times over.

    python tests/bench/tokenising.py [--rounds 3]

Writes docs/benchmarks/tokenising.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from peers import ROOT, facts

from shardbook.data.chitchat import chitchat_file
from shardbook.data.encoding import load_tokenizer
from shardbook.data.sources import load_sources
from shardbook.data.tokenized import build_documents
from shardbook.model.embedded import smollm2_folder
from shardbook.recipe import find_recipe, load_recipe

OUT = ROOT / "docs" / "benchmarks" / "tokenising.json"
TIMES = 4
PROCESSES = (1, 2)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    folder, found = smollm2_folder(), {str(count): [] for count in PROCESSES}
    tokenizer = load_tokenizer(folder, "model.tokenizer")
    with tempfile.TemporaryDirectory() as place:
        rows = Path(place) / "rows.jsonl"
        rows.write_text(chitchat_file("chitchat").read_text() * TIMES)
        load_sources(str(rows), "data.train")  # its table is made once, and is not measured
        for round_ in range(rounds):
            for count in PROCESSES:
                # another system prompt each time: what is tokenised already is not again
                words = (f"data.train={rows}", "data.max_length=8192", "data.eval_size=0", f"data.num_proc={count}")
                words += (f"data.system=Round {round_} with {count} at {time.time()}.",)
                data = load_recipe(find_recipe("smollm2-135m-fsdp"), words).data
                began = time.perf_counter()
                documents, _ = build_documents(data, tokenizer, folder)
                seconds = time.perf_counter() - began
                tokens = round(documents.mean_length * documents.totals.examples)
                found[str(count)].append({"seconds": seconds, "tokens": tokens})
                print(
                    f"{count} processes: {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} a second",
                    flush=True,
                )
    middle = {count: statistics.median(one["tokens"] / one["seconds"] for one in all_) for count, all_ in found.items()}
    OUT.write_text(json.dumps(facts(Path(place)) | {"tokens_per_second": middle, "rounds": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
