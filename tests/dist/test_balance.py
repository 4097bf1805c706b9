"""The auxiliary loss of routers through whole runs, under the stages: against one plain transformers process whose own
function balances the documents of a micro-batch of all ranks; its bytes, its metrics, and what is refused."""

import dataclasses
import json
import math
import shutil
from functools import cache
from importlib import import_module

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
    assert_parity,
    assert_replicas_agree,
    outcomes_of,
    rows_of_steps,
    run_cases,
)
from families import write_family
from planted import replace
from safetensors.torch import load_file
from tiny import said_by
from traced import traced
from transformers import AutoModelForCausalLM
from world import metrics, run_train, run_world

from shardbook.recipe import load_recipe

FILE = "model.safetensors"
COEFFICIENT = 0.5  # large, so that a share that is wrong shows
AUX = f"train.router_aux_loss_coef={COEFFICIENT}"
# a micro-batch is one row of each data-parallel rank
CASES = [
    Case("zero3", 1, 2, 3, True, checkpointing="selective", extra=(AUX,)),
    Case("ddp", 2, 1, 2, extra=(AUX,)),
    Case("zero1", 1, 2, 2, checkpointing="full", extra=(AUX,)),
    Case("zero2", 1, 2, 1, extra=(AUX, "data.packing=false")),
]
WIDE = [
    Case("hsdp", 2, 2, 2, True, extra=(AUX,)),
    Case("zero3", 1, 2, 2, True, cp=2, extra=(AUX,)),
]


def train_balanced(folder, steps, ranks, max_norm):
    """Trains transformers' model in `folder` on rows of documents, `ranks` of them to a micro-batch of all ranks.
    Returns the result, and of each step the auxiliary loss and the fullest expert's multiple in its rows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    balance = import_module(type(model).__module__).load_balancing_loss_func
    chosen, logged = model.config.num_experts_per_tok, []

    def loss_of(step):
        rows = steps[step]
        total, terms, picked = sum(sum(mask[1:]) for row in rows for _, mask in row), [], 0
        for first in range(0, len(rows), ranks):
            documents = [document for row in rows[first : first + ranks] for document in row]
            outputs = [model(input_ids=torch.tensor(ids)[None], output_router_logits=True) for ids, _ in documents]
            logits = tuple(map(torch.cat, zip(*(output.router_logits for output in outputs), strict=True)))
            parts = [reference.document_loss(model, document) for document in documents]
            share = sum(count for _, count in parts) / total
            aux = balance(logits, logits[0].shape[1], chosen)
            experts = logits[0].shape[1]
            ids = (each.softmax(-1).topk(chosen).indices.flatten() for each in logits)
            picked = picked + torch.stack([each.bincount(minlength=experts) for each in ids])
            terms.append((sum(part for part, _ in parts) / total, share * aux))
        fullest = picked.max().item() * experts / picked[0].sum().item()
        logged.append((sum(float(aux.detach()) for _, aux in terms), fullest))
        return sum(nll + COEFFICIENT * aux for nll, aux in terms)

    return reference.descend(model, loss_of, len(steps), RATE, DECAY, max_norm), logged


@pytest.fixture(scope="module")
def expected(recipe, tiny, tmp_path_factory):
    """By family and case what the plain process makes of it, and the folder of the family's model."""
    folder = tmp_path_factory.mktemp("balance")

    @cache
    def folder_of(family):
        write_family(folder / family / "model", family)
        return folder / family

    @cache
    def of(family, rows, ranks, clips, words):
        steps = rows_of_steps(recipe, tiny, rows, words, 3)
        return train_balanced(folder_of(family) / "model", steps, ranks, MAX_NORM if clips else 0.0)

    def expect(family, case):
        words = tuple(word for word in case.extra if word.startswith("data."))
        return of(family, case.rows, case.rows // case.micros, case.clips, words)

    return folder_of, expect


def assert_balanced(family, cases, recipe, expected, results):
    for case in cases:
        found = outcomes_of(case, results)
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        assert_events(found)
        assert_parity(found[0].result, expected[1](family, case)[0], case=case.name)


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3_moe", "granitemoe", "gpt_oss"))]
)
def test_stages_balance_what_one_process_does(family, recipe, expected, tmp_path):
    folder = expected[0](family)
    assert run_world(2, run_cases, recipe, folder, CASES, tmp_path) == [[], []]
    assert_balanced(family, CASES, recipe, expected, tmp_path)


@pytest.mark.slow
def test_replicas_and_slices_of_rows_balance_alike(recipe, expected, tmp_path):
    folder = expected[0]("mixtral")
    assert run_world(4, run_cases, recipe, folder, WIDE, tmp_path) == [[]] * 4
    assert_balanced("mixtral", WIDE, recipe, expected, tmp_path)


COMPILED = Case("zero3", 1, 2, 2, extra=(AUX, "train.compile=true"))


@pytest.mark.slow
def test_compiled_blocks_leave_the_same_logits(recipe, expected, tmp_path):
    folder = expected[0]("mixtral")
    assert run_world(2, traced, run_cases, recipe, folder, [COMPILED], tmp_path) == [[], []]
    assert_balanced("mixtral", [COMPILED], recipe, expected, tmp_path)


def test_what_is_logged_is_the_plain_process_own(recipe, expected, tmp_path):
    """And an evaluation's loss is that of its tokens alone; steps that are not clipped are those of the reference."""
    case = CASES[1]
    folder, (want, logged) = expected[0]("mixtral"), expected[1]("mixtral", case)
    words = [word for word in case.words(folder) if not word.startswith("run.name=")]
    rows = metrics(run_train(2, recipe, "logged", *words))
    steps = [row for row in rows if "train/loss" in row]
    for row, loss, (aux, fullest) in zip(steps, want.losses, logged, strict=True):
        assert row["train/loss"] == pytest.approx(loss, rel=1e-6)
        assert row["train/router_aux_loss"] == pytest.approx(aux, rel=1e-6)
        assert row["train/expert_load_max"] == pytest.approx(fullest, rel=1e-6)
        assert 0 < row["train/router_entropy"] < math.log(4)
    plain = metrics(run_train(2, recipe, "plain", *(word for word in words if word != AUX)))
    assert rows[0]["eval/loss"] == plain[0]["eval/loss"]
    assert rows[0]["eval/router_aux_loss"] > 1 and "eval/router_aux_loss" not in plain[0]


def test_a_frozen_router_stays(recipe, expected, tmp_path):
    """To the bit, though the loss would move it; the rest learns."""
    folder = expected[0]("mixtral") / "model"
    words = (f"model.path={folder}", "train.freeze_router=true", AUX, "optim.weight_decay=0.1", "train.steps=2")
    before, after = (
        load_file(file) for file in (folder / FILE, run_train(2, recipe, "frozen", *words) / "export" / FILE)
    )
    routers = {name for name in before if ".gate." in name}
    assert len(routers) == 4 and all(torch.equal(before[name], after[name]) for name in routers)
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - routers)


def test_adapters_learn_of_the_balance(recipe, expected):
    """Through the hidden states that frozen routers read: two ranks as one with twice the rows."""
    words = (f"model.path={expected[0]('mixtral') / 'model'}", "lora.r=4", "train.steps=3", "optim.learning_rate=1e-2")
    runs = [
        run_train(2, recipe, "lora-2", *words, AUX),
        run_train(1, recipe, "lora-1", *words, AUX, "train.per_device_train_batch_size=2"),
        run_train(2, recipe, "lora-0", *words),
    ]
    two, one, without = ([row for row in metrics(run) if "train/loss" in row] for run in runs)
    for ours, theirs in zip(two, one, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/router_aux_loss", "train/expert_load_max"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-6)
    shares = [COEFFICIENT * row["train/router_aux_loss"] for row in two]
    tokens_alone = [row["train/loss"] - share for row, share in zip(two, shares, strict=True)]
    assert tokens_alone[0] == pytest.approx(without[0]["train/loss"], rel=1e-6)
    assert tokens_alone[2] != pytest.approx(without[2]["train/loss"], rel=1e-4)


def counts_of_own_tokens():
    from shardbook.objectives import balance

    class Alone:
        is_initialized = staticmethod(lambda: False)

    balance.dist = Alone


def padding_counts():
    from shardbook.objectives import balance

    real = balance.measure_balance
    replace(
        real,
        lambda logits, micro, *more: real(
            logits, dataclasses.replace(micro, is_token=torch.ones_like(micro.is_token)), *more
        ),
    )


def each_micro_batch_counts_whole():
    from shardbook.objectives import balance

    real = balance.measure_balance

    def measure(logits, micro, totals, chosen):
        return real(logits, micro, totals, chosen)._replace(aux_loss=2 * real(logits, micro, totals, chosen).aux_loss)

    replace(real, measure)


def logits_have_no_gradient():
    from shardbook.objectives import balance

    real = balance.measure_balance
    replace(real, lambda logits, *more: real([each.detach() for each in logits], *more))


BUGS = (counts_of_own_tokens, padding_counts, each_micro_batch_counts_whole, logits_have_no_gradient)


def run_with(bug, *given):

    bug()
    return run_cases(*given)


@pytest.mark.parametrize("bug", [BUGS[0], *(pytest.param(bug, marks=pytest.mark.slow) for bug in BUGS[1:])])
def test_a_planted_bug_turns_it_red(bug, recipe, expected, tmp_path):
    case = CASES[1]
    run_world(2, run_with, bug, recipe, expected[0]("mixtral"), [case], tmp_path)
    with pytest.raises(AssertionError, match="e-0"):
        assert_parity(outcomes_of(case, tmp_path)[0].result, expected[1]("mixtral", case)[0])


REFUSED = {
    "method": (["method=dpo"], "only sft has an auxiliary loss; leave it out"),
    "pipeline": (["parallel.pp_size=2"], "its gradient needs the choices of all layers"),
    "compiled": (
        ["train.compile=true", "activation.checkpointing=full"],
        "set train.compile=false or activation.checkpointing=none",
    ),
    "negative": (["train.router_aux_loss_coef=-1"], "greater than or equal to 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compose_is_refused(name, recipe):
    words, message = REFUSED[name]
    assert message in said_by(load_recipe, recipe, [AUX, *words])


def place(recipe, folder, words):
    from shardbook.model.families import load_config
    from shardbook.parallel.placement import World, place_model

    asked = load_recipe(recipe, [f"model.path={folder}", "precision.params=fp32", *words])
    return place_model(asked, World(1, 1, 0, torch.device("cpu")), load_config(asked.model, folder, 64), None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (AUX, "transformers has no auxiliary loss of the family 'llama'; set it to 0"),
        ("train.freeze_router=true", "train.freeze_router = true: family 'llama' has no router; leave it out"),
    ],
)
def test_families_without_routers_are_refused(words, message, recipe, tiny):
    assert message in said_by(place, recipe, tiny / "model", [words])


def test_a_config_that_asks_for_the_loss_is_told_to_the_recipe(recipe, expected, tmp_path):
    folder = shutil.copytree(expected[0]("mixtral") / "model", tmp_path / "asks")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    message = said_by(place, recipe, folder, [])
    assert "set train.router_aux_loss_coef, to 0.001 as its config has it, or to 0" in message
    for coefficient in (0, 0.001):
        layout = place(recipe, folder, [f"train.router_aux_loss_coef={coefficient}"]).layout
        assert layout.balanced == ((4,) * 4 if coefficient else ())
