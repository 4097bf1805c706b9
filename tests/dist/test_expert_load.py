"""How often each expert is chosen, counted through whole runs: against the choices of one plain transformers process on
the same rows, number by number; its bytes; what must count once, or not at all; and where nothing is counted."""

import dataclasses
import json
import os

import pytest
import reference
import torch
from cases import (
    DECAY,
    MAX_NORM,
    RATE,
    Case,
    assert_events,
    assert_exact_bytes,
    documents_of_steps,
    equal_bytes,
    outcomes_of,
    run_cases,
)
from families import write_family
from planted import replace
from tiny import write_pairs
from traced import traced
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import metrics, run_world

from shardbook.recipe import load_recipe

EP, UNPACKED = "parallel.ep_size=2", "data.packing=false"
CASES = [
    Case("zero3", 1, 2, 3, True, checkpointing="selective"),
    Case("ddp", 2, 1, 2, checkpointing="full", extra=(EP,)),
    Case("zero2", 1, 2, 2, extra=(UNPACKED, "train.per_device_train_batch_size=2")),
    Case("zero1", 1, 2, 2, True, checkpointing="every:2", extra=(EP, UNPACKED)),
]
# chooses by a bias and in groups, behind a block without experts; does not divide weights by their sum; by logits alone
SORTS = ("deepseek_v3", "qwen3_moe", "gpt_oss")
WIDE = [
    Case("hsdp", 2, 2, 2, True, extra=(EP,)),
    Case("zero3", 1, 2, 2, True, cp=2, checkpointing="full", extra=(EP,)),
    Case("zero3", 1, 2, 4, True, pp=2, checkpointing="full", extra=(EP,)),
    Case("zero1", 1, 2, 4, True, pp=2, chunks=2, schedule="interleaved", checkpointing="full"),
    Case("ddp", 2, 1, 4, pp=2, schedule="gpipe", extra=(UNPACKED,)),
]
COMPILED = [
    Case("zero3", 1, 2, 2, extra=("train.compile=true",)),
    Case("zero2", 1, 2, 2, extra=("train.compile=true", EP, UNPACKED)),
    Case("zero3", 1, 2, 2, checkpointing="full", extra=("train.compile=true",)),
    Case("zero3", 1, 2, 2, checkpointing="selective", extra=("train.compile=true", UNPACKED)),
    Case("ddp", 2, 1, 2, checkpointing="budget:0.3", extra=("train.compile=true",)),
]


class Choices:
    """Counts, beside a plain model of transformers, how many tokens choose each expert of each block."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.modules = [module for module in self.model.modules() if hasattr(module, "is_transposed")]
        self.counts, self.has_logits = {}, self.model.config.model_type == "mixtral"
        for module in [] if self.has_logits else self.modules:
            module.register_forward_pre_hook(lambda module, given: self.add(module, given[1]))

    def add(self, module, ids):
        self.counts[module] = self.counts.get(module, 0) + ids.flatten().bincount(minlength=module.num_experts)

    def take(self):
        counts = [number for module in self.modules for number in self.counts[module].tolist()]
        self.counts = {}
        return counts

    def run(self, documents):
        """By the logits alone, where these say all: the experts of a token have the greatest ones."""
        for ids, _ in documents if self.has_logits else ():
            with torch.no_grad():
                output = self.model(input_ids=torch.tensor(ids)[None], output_router_logits=True)
            for module, logits in zip(self.modules, output.router_logits, strict=True):
                self.add(module, logits.topk(self.model.config.num_experts_per_tok).indices)
        return [reference.document_loss(self.model, document) for document in documents]


def count_plain(folder, steps, max_norm):
    """Trains transformers' model in `folder` on the documents of each step. Returns the counts of each step."""
    choices, counted = Choices(folder), []

    def loss_of(step):
        parts = choices.run(steps[step])
        counted.append(choices.take())
        return sum(part for part, _ in parts) / sum(count for _, count in parts)

    reference.descend(choices.model, loss_of, len(steps), RATE, DECAY, max_norm)
    return counted


def load_of(counts, experts):
    blocks = [counts[first : first + experts] for first in range(0, len(counts), experts)]
    return max(max(block) / (sum(block) / experts) for block in blocks)


def run_noting(bug, recipe, folder, cases, results):
    """`run_cases` with what `bug` plants; what each case counted goes to results/<case>.counts.<rank>."""
    from shardbook.parallel.expert_load import ExpertLoad

    real, noted = ExpertLoad.metrics, {}  # by counter, of which each case has one

    def note(load, what, counts):
        noted.setdefault(load, []).append((what, counts.tolist()))
        return real(load, what, counts)

    ExpertLoad.metrics = note
    if bug:
        bug()
    errors, rank = run_cases(recipe, folder, cases, results), os.environ["RANK"]
    for case, counts in zip(cases, noted.values(), strict=not (bug or errors)):
        (results / f"{case.name}.counts.{rank}").write_text(json.dumps(counts))
    return errors


def counts_of(case, results, what="train"):
    """Those of every rank, which are the same."""
    (noted,) = {(results / f"{case.name}.counts.{rank}").read_text() for rank in range(case.world)}
    return [counts for of, counts in json.loads(noted) if of == what]


def assert_counted(family, folder, cases, recipe, tiny, results):
    for case in cases:
        found = outcomes_of(case, results)
        assert_exact_bytes(found)
        if case.cp == 1:
            assert_events(found)
        words = tuple(word for word in case.extra if word.startswith("data."))
        steps = documents_of_steps(recipe, tiny, case.rows, words, case.steps)
        want = count_plain(folder / "model", steps, MAX_NORM if case.clips else 0.0)
        assert counts_of(case, results) == want, case.name
        rows = [row for row in metrics(results / case.name) if "train/loss" in row]
        for row, counts in zip(rows, want, strict=True):
            assert row["train/expert_load_max"] == pytest.approx(load_of(counts, 4), rel=1e-12), case.name


@pytest.mark.parametrize("family", ["mixtral", *(pytest.param(f, marks=pytest.mark.slow) for f in SORTS)])
def test_counts_are_those_of_one_process(family, recipe, tiny, tmp_path):
    """Of tokens, not of padding; a recomputed block's once; of experts by their numbers in the whole block."""
    write_family(tmp_path / "model", family)
    assert run_world(2, run_noting, None, recipe, tmp_path, CASES, tmp_path) == [[], []]
    assert_counted(family, tmp_path, CASES, recipe, tiny, tmp_path)
    # of the held-out rows, before the first step
    settings, choices = load_recipe(recipe), Choices(tmp_path / "model")
    choices.run(held_out_of(settings, tmp_path))
    want, (row, *_) = choices.take(), metrics(tmp_path / CASES[0].name)
    assert counts_of(CASES[0], tmp_path, "eval")[0] == want
    assert row["eval/expert_load_max"] == pytest.approx(load_of(want, 4), rel=1e-12)


def held_out_of(settings, folder):
    from shardbook.data.tokenized import build_documents

    _, held_out = build_documents(settings.data, AutoTokenizer.from_pretrained(folder / "model"), folder / "model")
    rows = [held_out.encoded[number] for row in held_out.rows for number in row]
    return [(each["input_ids"], each["mask"]) for each in rows]


@pytest.mark.slow
def test_ranks_along_every_axis_have_the_counts_of_all(recipe, tiny, tmp_path):
    """Along cp of their slices, along pp of their blocks; a pass of a pipeline recomputes while another has begun."""
    write_family(tmp_path / "model", "mixtral")
    assert run_world(4, run_noting, None, recipe, tmp_path, WIDE, tmp_path) == [[]] * 4
    assert_counted("mixtral", tmp_path, WIDE, recipe, tiny, tmp_path)


@pytest.mark.slow
def test_compiled_blocks_count_alike(recipe, tiny, tmp_path):
    """Recomputed ones too."""
    write_family(tmp_path / "model", "mixtral")
    assert run_world(2, traced, run_noting, None, recipe, tmp_path, COMPILED, tmp_path) == [[], []]
    assert_counted("mixtral", tmp_path, COMPILED, recipe, tiny, tmp_path)


def count_graphs(*given):
    from torch._dynamo.utils import counters

    assert not traced(run_noting, *given)
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.slow
def test_blocks_share_a_graph_as_without_counting(recipe, tmp_path):
    """The compiler gives up a function of which it has made eight graphs."""
    write_family(tmp_path / "model", "mixtral")
    case = dataclasses.replace(COMPILED[2], shards=1)
    graphs = []
    for name, bug in (("counted", None), ("not", nothing_is_counted)):
        (tmp_path / name).mkdir()
        graphs += run_world(1, count_graphs, bug, recipe, tmp_path, [case], tmp_path / name)
    assert graphs[0] == graphs[1] and graphs[0][0] > 0


def nothing_is_counted():
    from shardbook.parallel.expert_load import count_experts

    replace(count_experts, lambda model: ())


def test_counting_changes_no_bit_and_sends_one_number_an_expert(recipe, tmp_path):
    write_family(tmp_path / "model", "mixtral")
    case = dataclasses.replace(CASES[0], extra=("train.seed=3",))
    runs = []
    for name, bug in (("counted", None), ("not", nothing_is_counted)):
        (results := tmp_path / name).mkdir()
        assert run_world(2, run_noting, bug, recipe, tmp_path, [case], results) == [[], []]
        runs.append(outcomes_of(case, results))
    for counted, plain in zip(*runs, strict=True):
        assert counted.digest == plain.digest
        more, before = (outcome.traffic[0].pop(("all_reduce", "dp_shard")) for outcome in (counted, plain))
        assert (more.calls - before.calls, more.payload_bytes - before.payload_bytes) == (1, 8 * 4 * 4)
        assert counted.traffic[0] == plain.traffic[0]
    (one, *_), (other, *_) = runs
    assert (one.result.losses, one.result.norms) == (other.result.losses, other.result.norms)
    for ours, theirs in zip(one.result.gradients, other.result.gradients, strict=True):
        assert ours.keys() == theirs.keys() and all(equal_bytes(ours[name], theirs[name]) for name in ours)
    logged = [[name for row in metrics(tmp_path / name / case.name) for name in row] for name in ("counted", "not")]
    assert logged[0].count("train/expert_load_max") == 3 and "train/expert_load_max" not in logged[1]


@pytest.mark.slow
def test_what_runs_beside_a_step_is_not_counted(recipe, tmp_path):
    """A reference that is computed in the step, or in an evaluation; a micro-batch that is run twice to check a rank;
    samples."""
    write_family(tmp_path / "model", "mixtral")
    pairs = write_pairs(tmp_path / "pairs.jsonl", 24)
    words = ("method=dpo", f"data.train={pairs}", "data.max_length=96", "lora.r=4", "train.export=false")
    before, inside = (
        Case("zero3", 1, 2, 2, extra=(*words, f"preference.precompute_ref_log_probs={asked}"))
        for asked in ("true", "false")
    )
    more = (
        "train.check_steps=1",
        "train.deterministic=true",
        "generate.steps=1",
        "generate.samples=3",
        "generate.max_new_tokens=5",
    )
    both = [CASES[1], dataclasses.replace(CASES[1], extra=(EP, *more))]
    cases = [before, inside, *both]
    assert run_world(2, run_noting, None, recipe, tmp_path, cases, tmp_path) == [[], []]
    for one, other in ((before, inside), both):
        for what in ("train", "eval"):
            assert (counts := counts_of(one, tmp_path, what)) == counts_of(other, tmp_path, what) and counts


# -- planted bugs


def recomputed_blocks_count_again():
    from shardbook.parallel.expert_load import ExpertLoad

    ExpertLoad.close = lambda *given: None


def padding_counts():
    from shardbook.parallel.expert_load import ExpertLoad

    real = ExpertLoad.open
    ExpertLoad.open = lambda load, micro: real(
        load, dataclasses.replace(micro, is_token=torch.ones_like(micro.is_token))
    )


def each_rank_logs_its_own_tokens():
    from shardbook.parallel.expert_load import ExpertLoad

    ExpertLoad.sum = lambda load: load.counts


def counts_of_the_step_before_go_on():
    from shardbook.parallel.expert_load import ExpertLoad

    ExpertLoad.clear = lambda load: None


BUGS = {
    recomputed_blocks_count_again: CASES[1],
    padding_counts: CASES[2],
    each_rank_logs_its_own_tokens: CASES[2],
    counts_of_the_step_before_go_on: CASES[2],
}
QUICK = (recomputed_blocks_count_again, padding_counts)


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.slow] * (bug not in QUICK)) for bug in BUGS])
def test_a_planted_bug_turns_it_red(bug, recipe, tiny, tmp_path):
    """It runs to its end, and is wrong."""
    write_family(tmp_path / "model", "mixtral")
    case = dataclasses.replace(BUGS[bug], steps=2)
    assert run_world(2, run_noting, bug, recipe, tmp_path, [case], tmp_path) == [[], []]
    with pytest.raises((AssertionError, ValueError)):
        assert_counted("mixtral", tmp_path, [case], recipe, tiny, tmp_path)


# -- where nothing is counted


def placed(recipe, folder, *words):
    """What one rank of a run does before there is a process group."""
    from shardbook.model.families import load_config
    from shardbook.parallel.placement import World, place_model
    from shardbook.recipe import resolve_precision

    asked = resolve_precision(load_recipe(recipe, [f"model.path={folder}", UNPACKED, *words]), "cpu")
    return place_model(asked, World(1, 1, 0, torch.device("cpu")), load_config(asked.model, folder, 64), None)


COUNTED = {  # family -> of each block, how many experts are counted
    "llama": (0,) * 4,  # dense
    "dbrx": (0,) * 4,  # not behind transformers' interface of experts
    "mixtral": (4,) * 4,
    "deepseek_v3": (0, 4, 4, 4),  # a first block without experts
}


@pytest.mark.parametrize("family", COUNTED)
def test_experts_that_are_not_behind_the_interface_are_not_counted(family, recipe, tmp_path):
    from shardbook.model.families import load_config
    from shardbook.parallel.placement import World, place_model
    from shardbook.recipe import resolve_precision

    folder = write_family(tmp_path / "model", family)
    asked = resolve_precision(load_recipe(recipe, [f"model.path={folder}", UNPACKED]), "cpu")
    world, config = World(1, 1, 0, torch.device("cpu")), load_config(asked.model, folder, 64)
    assert place_model(asked, world, config, None).layout.counted == COUNTED[family]
