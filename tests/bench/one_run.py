"""One run of Shardbook under the watch, as a world of one.

python tests/bench/one_run.py OUT STEPS RECIPE [key=value ...]
"""

import sys
from pathlib import Path

from watch import watch

from shardbook.ranks.exits import exit_rank
from shardbook.train import main

if __name__ == "__main__":
    out, steps, *words = sys.argv[1:]
    with watch(int(steps), Path(out)):
        code = main([*words, f"train.steps={steps}"])
    exit_rank(code)
