"""A Llama on transformers' base model beside plain transformers: bits, tokens a second, live bytes, in one process.

With --walk also beside a checkout of Shardbook whose CausalLM walks the blocks itself (the last is commit 8323cf7).
Writes docs/benchmarks/base_model.json, which log.md tells of.

    python tests/bench/base_model.py [--walk CHECKOUT]       # some two minutes on two cores
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "benchmarks" / "base_model.json"
ROWS, LENGTH, ROUNDS = 1, 256, 9
PLAIN, OURS, WALK = "transformers", "shardbook", "walk"
METHOD = (
    "SmolLM2-135M, fp32, a full row of 256 drawn ids, sdpa: a forward and a backward of each form in turn, in one "
    "process, the order reversed every other round, after a round that does not count. Medians; ratios are medians of "
    "rounds. Live bytes: storages that the forward made and that live when it has returned. Off: the loss, relatively, "
    "and the largest difference of a parameter's gradient over the norm of the whole; 0 is the same bits."
)


class Made(TorchDispatchMode):
    """Notes each storage that operations make."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, work, types, given=(), named=None):
        found = work(*given, **(named or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.storages[StorageWeakRef(each.untyped_storage())] = each.untyped_storage().nbytes()
        return found

    def live_bytes(self, model):
        own = {StorageWeakRef(each.untyped_storage()) for each in (*model.parameters(), *model.buffers())}
        return sum(size for storage, size in self.storages.items() if storage not in own and not storage.expired())


def shardbook_form(source, folder, weights, ids):
    """The model of the Shardbook in `source`, and its loss of rows `ids`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "shardbook"]:
        del sys.modules[name]  # the other version's modules live on in its functions
    sys.path.insert(0, str(source))
    try:
        causal_lm, batches = (import_module(f"shardbook.{name}") for name in ("model.causal_lm", "parallel.batch"))
    finally:
        sys.path.remove(str(source))
    model = causal_lm.build_model(AutoConfig.from_pretrained(folder), "fp32", 1024)
    causal_lm.materialize(model, torch.device("cpu"))
    model.load_state_dict(weights)
    places = torch.arange(LENGTH).expand(ROWS, -1).contiguous()
    cu_seqlens = torch.arange(0, ids.numel() + 1, LENGTH, dtype=torch.int32)
    positions = torch.arange(ids.numel()).view(ROWS, LENGTH)[:, :-1].flatten()
    batch = batches.Batch(ids, places, cu_seqlens, positions, ids.flatten()[positions + 1], False, LENGTH)
    return model, lambda: model(batch, summed=True) / len(positions)


def gradients_of(model, loss):
    """The loss of a forward, bytes that live after it, and gradients by name."""
    model.zero_grad()
    with Made() as made:
        found = loss()
    live = made.live_bytes(model)
    found.backward()
    return found.detach(), live, {name: each.grad for name, each in model.named_parameters()}


def off(made, wanted):
    """How far a loss and gradients are off."""
    whole = torch.stack([each.norm() for each in wanted[2].values()]).norm()
    gradient = max((made[2][name] - each).norm() / whole for name, each in wanted[2].items())
    return {"loss": abs(made[0] / wanted[0] - 1).item(), "gradient": gradient.item()}


def step(model, loss):
    model.zero_grad()
    loss().backward()


def in_turn(forms):
    """Wall and CPU seconds of each form, round by round."""
    seconds = {name: {"wall": [], "cpu": []} for name in forms}
    for round_ in range(ROUNDS + 1):
        for name in reversed(list(forms)) if round_ % 2 else forms:
            began = time.perf_counter(), time.process_time()
            step(*forms[name])
            if round_:
                seconds[name]["wall"].append(time.perf_counter() - began[0])
                seconds[name]["cpu"].append(time.process_time() - began[1])
    return seconds


def ratio(first, second):
    return median(a / b for a, b in zip(first, second, strict=True))


def commit_of(folder):
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True).stdout.strip()


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--walk", type=Path, help="a checkout of commit 8323cf7 or of one before it")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args(words)
    from shardbook.model.embedded import smollm2_folder

    folder = smollm2_folder()
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.randint(3, plain.config.vocab_size, (ROWS, LENGTH))
    own = partial(shardbook_form, folder=folder, weights=plain.state_dict(), ids=ids)
    forms = {WALK: own(asked.walk / "src")} if asked.walk else {}
    forms |= {OURS: own(ROOT / "src"), PLAIN: (plain, lambda: plain(input_ids=ids, labels=ids, use_cache=False).loss)}
    found = {name: gradients_of(*form) for name, form in forms.items()}
    differences = {f"{name} from {OURS}": off(found[name], found[OURS]) for name in forms if name != OURS}
    live = {name: each[1] for name, each in found.items()}
    del found
    seconds = in_turn(forms)
    data = {"method": METHOD, "commit": commit_of(ROOT)}
    data |= {"walk": commit_of(asked.walk)} if asked.walk else {}
    data |= {"torch": torch.__version__, "transformers": transformers.__version__}
    data |= {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "off": differences, "live_bytes": live}
    data["tokens_per_second"] = {name: ids.numel() / median(each["wall"]) for name, each in seconds.items()}
    data["ratios"] = {
        f"{OURS} / {name}": {"live_bytes": live[OURS] / live[name]}
        | {kind: ratio(seconds[OURS][kind], each[kind]) for kind in ("wall", "cpu")}
        for name, each in seconds.items()
        if name != OURS
    }
    data["seconds"] = seconds
    asked.out.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({name: value for name, value in data.items() if name != "seconds"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
