"""Each family through the whole of a run: numbers against plain transformers in one process, and files both ways."""

import shutil

import pytest
import reference
import torch
from cases import (
    DECAY,
    MAX_NORM,
    RATE,
    TOLERANCE,
    Case,
    assert_case,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    documents_of_steps,
    outcomes_of,
    run_cases,
    same_bits,
)
from families import write_family, write_seeing
from safetensors.torch import load_file
from tiny import config, tokenizer, write_model
from world import losses, metrics, run_train, run_world

from shardbook.data.tokenized import build_documents
from shardbook.recipe import load_recipe

FAMILIES = ["olmo2", "smollm3", "granite", "phi3"]  # beside llama, which every other test has, and its nearest kin
KIN = ["mistral", "qwen2", "qwen3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for family in [*FAMILIES, *KIN]:
        write_model(folder / family / "model", family)
        write_model(folder / family / "untied", family, tied=False, vocab=287)
    return folder


@pytest.mark.parametrize(
    "family", [*FAMILIES[3:], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[:3] + KIN)]
)
def test_stages_are_transformers_to_a_millionth(family, recipe, tiny, base, tmp_path):
    cases = [Case("zero3", 1, 2, 3, True, False, "selective"), Case("ddp", 2, 1, 3, True, True, "full")]
    assert run_world(2, run_cases, recipe, base / family, cases, tmp_path) == [[], []]
    steps = documents_of_steps(recipe, tiny, 6)
    for case in cases:
        folder = base / family / ("model" if case.tied else "untied")
        want = reference.train(folder, steps, RATE, DECAY, max_norm=MAX_NORM)
        assert_case(case, outcomes_of(case, tmp_path), want)


# One of each sort: windows and two rotations, caps, sinks and experts, chunks and experts, a scale, a head with a bias,
# learned positions, alibi, latent attention with a buffer, experts by themselves; and what takes one document a row.
SORTS = [
    "gemma3_text",
    "gemma2",
    "gpt_oss",
    "llama4_text",
    "cohere2",
    "phi",
    "gpt2",
    "bloom",
    "deepseek_v3",
    "qwen3_moe",
]
ROWS = ["lfm2", "qwen3_next"]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*SORTS, *ROWS])
def test_every_sort_under_every_stage(family, recipe, tiny, tmp_path):
    write_family(tmp_path / "model", family)
    words = ("data.packing=false",) if family in ROWS else ()
    cases = [
        Case("zero3", 1, 2, 3, True, checkpointing="selective", extra=words),
        Case("zero2", 1, 2, 1, extra=words),
        Case("zero1", 1, 2, 3, checkpointing="full", extra=words),
        Case("ddp", 2, 1, 1, True, extra=words),
    ]
    assert run_world(2, run_cases, recipe, tmp_path, cases, tmp_path) == [[], []]
    for case in cases:
        steps = documents_of_steps(recipe, tiny, case.rows, words)
        want = reference.train(tmp_path / "model", steps, RATE, DECAY, max_norm=MAX_NORM if case.clips else 0.0)
        found = outcomes_of(case, tmp_path)
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        # recurrences are summed in another order where a row is padded
        assert_parity(found[0].result, want, 4e-6 if family in ROWS else TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_under_every_stage_however_recomputed(family, recipe, tiny, tmp_path):
    """Rows of stacked experts on two ranks, against one process. Of one stage all checkpointings have the same bits."""
    write_family(tmp_path / "model", family)
    stages = [("ddp", 2, 1), ("zero1", 1, 2), ("zero2", 1, 2), ("zero3", 1, 2)]
    cases = [Case(*s, checkpointing=kind) for s in stages for kind in ("none", "full", "selective")]
    assert run_world(2, run_cases, recipe, tmp_path, cases, tmp_path) == [[], []]
    want = reference.train(tmp_path / "model", documents_of_steps(recipe, tiny, cases[0].rows), RATE, DECAY)
    first = None
    for case in cases:
        found = outcomes_of(case, tmp_path)
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        assert_parity(found[0].result, want)
        first = found[0].result if case.checkpointing == "none" else first
        assert same_bits(found[0].result, first)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *KIN])
def test_an_export_is_read_by_transformers(family, recipe, base, tmp_path):
    """With no step taken its logits are the source's; and adapters find the family's matrices."""
    folder = base / family / "untied"
    run = run_train(
        1, recipe, family, f"model.path={folder}", "train.steps=1", "optim.learning_rate=1e-30", "train.export=true"
    )
    theirs, ours = (
        reference.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)(torch.arange(3, 60)[None]).logits
        for where in (folder, run / "export")
    )
    assert torch.equal(theirs, ours)
    peft = pytest.importorskip("peft")
    run = run_train(
        1, recipe, f"{family}-lora", f"model.path={folder}", "train.steps=2", "lora.r=4", "train.export=true"
    )
    plain = reference.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, run / "export")
    assert (adapted(input_ids=torch.arange(3, 60)[None]).logits - theirs).abs().max() > 1e-4


# One of each sort of files: a head of another name, experts one by one, three tensors put together, buffers, a text
# model's prefix, a tied head.
FILES = ["gpt_neox", "qwen3_moe", "olmo_hybrid", "deepseek_v3", "gemma3", "gemma2"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FILES)
def test_each_sort_of_files_goes_on_to_the_bit_and_is_read_again(family, recipe, tmp_path):
    """A run that stops after two of three steps; and what it exports, by transformers, has the run's last loss."""
    write = write_seeing if family == "gemma3" else write_family
    write(tmp_path / "model", family)
    words = [f"model.path={tmp_path / 'model'}", "train.steps=3", "train.save_steps=1", "train.eval_steps=3"]
    words += ["train.export=true", "train.export_dtype=fp32", *["data.packing=false"] * (family == "olmo_hybrid")]
    run, again = run_train(2, recipe, f"{family}-straight", *words), recipe.parent / f"{family}-again"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("export", "run.json", "step-000003"))
    run_train(2, recipe, again.name, *words)
    assert losses(again) == losses(run) and metrics(again)[-1]["eval/loss"] == metrics(run)[-1]["eval/loss"]
    mine, theirs = (load_file(each / "export" / "model.safetensors") for each in (again, run))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert len(set(losses(run))) == 3
    model = reference.AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    _, held_out = build_documents(load_recipe(recipe).data, tokenizer(), tmp_path / "model")
    with torch.no_grad():
        rows = [held_out.encoded[number] for row in held_out.rows for number in row]
        parts = [reference.document_loss(model, (row["input_ids"], row["mask"])) for row in rows]
    wanted = sum(part.item() for part, _ in parts) / sum(count for _, count in parts)
    assert metrics(run)[-1]["eval/loss"] == pytest.approx(wanted, rel=1e-5 if family == "olmo_hybrid" else TOLERANCE)


REFUSED = {
    "phi3 ": ({"resid_pdrop": 0.1}, "resid_pdrop = 0.1; only 0"),
    "phi3  ": (
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 32,
            },
        },
        "beyond 32 tokens the rotation",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_blocks_do_otherwise_is_refused_in_one_line(family, tmp_path):
    from shardbook.model.families import load_config
    from shardbook.recipe import Model, RecipeError

    changes, said = REFUSED[family]
    config(family.strip(), **changes).save_pretrained(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_config(Model(path=str(tmp_path)), tmp_path, 64)
    assert said in str(caught.value) and "\n" not in str(caught.value)
