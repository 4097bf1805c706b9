"""LoRA on every stage: numbers against transformers + peft in a plain process, bytes as predicted, files both ways."""

import itertools
import json
import shutil
from functools import cache

import pytest
import reference
import torch
from adapted import ours, write_adapters
from cases import (
    DECAY,
    MAX_NORM,
    RATE,
    TOLERANCE,
    Case,
    assert_case,
    assert_events,
    documents_of_steps,
    outcomes_of,
    run_cases,
    same_bits,
)
from planted import replace
from transformers import AutoTokenizer, GenerationConfig
from world import losses, metrics, run_train, run_world, train_rank

peft = pytest.importorskip("peft")

KINDS = {  # peft's settings, and whether the model is tied
    "all": ({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, True),
    "rslora": ({"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}, True),
    "dora": ({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "use_dora": True}, False),
    "saved": (
        {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "up_proj"], "modules_to_save": ["lm_head"]},
        False,
    ),
}


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def words_of(kind: str, folder) -> tuple[str, ...]:
    settings, _ = KINDS[kind]
    words = [
        f"lora.{key}={str(value).lower() if value is True else json.dumps(value)}" for key, value in settings.items()
    ]
    return (*(word.replace('"all-linear"', "all-linear") for word in words), f"lora.adapter={folder / kind}")


def plain_model(tiny, kind: str):
    folder = tiny / ("model" if KINDS[kind][1] else "untied")
    return reference.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory):
    """Adapters of each kind as peft writes them, A and B (and magnitudes) at random."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, KINDS, lambda kind: plain_model(tiny, kind))
    return folder


@pytest.fixture(scope="module")
def wanted_of(recipe, tiny, adapters):
    """What transformers + peft make of a case's data."""
    made = {}

    def train(case: Case, kind: str) -> reference.Result:
        rows = case.world * case.micros
        key = kind, rows, case.clips
        if key not in made:
            model = peft.PeftModel.from_pretrained(plain_model(tiny, kind), adapters / kind, is_trainable=True)
            steps = documents_of_steps(recipe, tiny, rows)

            def loss_of(step):
                parts = [reference.document_loss(model, document) for document in steps[step]]
                return sum(part for part, _ in parts) / sum(count for _, count in parts)

            result = reference.descend(model, loss_of, len(steps), RATE, DECAY, MAX_NORM if case.clips else 0.0)
            result.gradients = [{ours(name): g for name, g in found.items()} for found in result.gradients]
            result.weights = {ours(name): w for name, w in result.weights.items() if "original_module" not in name}
            made[key] = result
        return made[key]

    return train


LAYOUTS = [("ddp", 2, 1), ("zero1", 1, 2), ("zero2", 1, 2), ("zero3", 1, 2), ("hsdp", 2, 1), ("hsdp", 1, 2)]
ALONE = [("ddp", 1, 1), ("zero3", 1, 1)]


def cases_of(adapters) -> list[tuple[str, Case]]:
    """Every kind in every stage; schedules, clipping and checkpointing in turn."""
    options = itertools.cycle([(1, False, "none"), (3, True, "full"), (1, True, "selective"), (2, False, "none")])
    found = []
    for kind, layout in itertools.product(KINDS, LAYOUTS + ALONE):
        micros, clips, checkpointing = next(options)
        tied = KINDS[kind][1]
        found.append((kind, Case(*layout, micros, clips, tied, checkpointing, words_of(kind, adapters))))
        next(options) if layout == LAYOUTS[-1] else None  # another pairing for the next kind
    return found


@pytest.fixture(scope="module")
def outcomes(recipe, tiny, adapters, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")

    @cache
    def run(kind: str) -> None:
        for world in (1, 2):
            chosen = [case for name, case in cases_of(adapters) if case.world == world and name == kind]
            assert run_world(world, run_cases, recipe, tiny, chosen, results) == [[]] * world

    def of(kind: str, case: Case):
        run(kind)
        return outcomes_of(case, results)

    return of


@pytest.mark.parametrize("kind", ["all", slow("rslora"), slow("dora"), slow("saved")])
def test_every_stage_is_peft_to_a_millionth(kind, adapters, outcomes, wanted_of):
    for name, case in cases_of(adapters):
        if name == kind:
            found, want = outcomes(kind, case), wanted_of(case, kind)
            trained = set(found[0].result.gradients[0])
            assert any("lora_A" in word for word in trained) and not any("layernorm" in word for word in trained)
            assert_case(case, found, want)
            assert_events(found)


@pytest.mark.slow
def test_two_ranks_bitwise(recipe, tiny, adapters, tmp_path):
    words = words_of("all", adapters)
    for micros, classes in ((1, [["ddp", "zero1", "zero2", "zero3"]]), (3, [["ddp", "zero1"], ["zero2", "zero3"]])):
        cases = {
            s: Case(s, *((2, 1) if s == "ddp" else (1, 2)), micros, extra=words) for s in itertools.chain(*classes)
        }
        assert run_world(2, run_cases, recipe, tiny, list(cases.values()), tmp_path) == [[], []]
        for group in classes:
            first, *others = [outcomes_of(cases[stage], tmp_path)[0].result for stage in group]
            assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("stage", ["ddp", slow("zero2"), "zero3"])
def test_a_bf16_base_keeps_and_sends_what_is_predicted(stage, recipe, tiny, adapters, tmp_path):
    extra = (*words_of("all", adapters), "precision.params=bf16")
    case = Case(stage, *((2, 1) if stage == "ddp" else (1, 2)), 3, extra=extra)
    assert run_world(2, run_cases, recipe, tiny, [case], tmp_path) == [[], []]
    for outcome in outcomes_of(case, tmp_path):
        assert outcome.traffic[0] == outcome.traffic[1] and outcome.memory[0] == outcome.memory[1]
        weights = outcomes_of(case, tmp_path)[0].result.weights
        assert outcome.memory[0]["memory/params_bytes"] < 4 * sum(weight.numel() for weight in weights.values())
    assert weights["model.norm.weight"].dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for name, value in weights.items() if "lora" in name)


def logits_of(model, tiny) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 60)[None]).logits


def held_out_loss(model, recipe, tiny) -> float:
    """What the run evaluates, by transformers and peft."""
    from shardbook.data.tokenized import build_documents
    from shardbook.recipe import load_recipe

    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    _, held_out = build_documents(load_recipe(recipe).data, tokenizer, tiny / "model")
    with torch.no_grad():
        rows = [held_out.encoded[number] for row in held_out.rows for number in row]
        parts = [reference.document_loss(model, (row["input_ids"], row["mask"])) for row in rows]
    return sum(part.item() for part, _ in parts) / sum(count for _, count in parts)


@pytest.mark.parametrize("kind", ["all", slow("dora"), slow("saved")])
def test_files_go_both_ways(kind, recipe, tiny, adapters, tmp_path):
    """Ours is read by peft, what is merged by transformers, and a checkpoint has adapters alone."""
    from shardbook.cli import main

    tied = f"model.path={tiny}/{'model' if KINDS[kind][1] else 'untied'}"
    words = (*words_of(kind, adapters), tied, "train.export=true", "train.save_steps=1", "train.eval_steps=2")
    run = run_train(2, recipe, f"out-{kind}", "train.steps=2", *words)
    model = peft.PeftModel.from_pretrained(plain_model(tiny, kind), run / "export").eval()
    assert main(["export", str(run), "--merge", "--dtype", "fp32", "--out", str(tmp_path / "merged")]) == 0
    merged = reference.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert main(["export", str(run), "--out", str(tmp_path / "again")]) == 0
    again = peft.PeftModel.from_pretrained(plain_model(tiny, kind), tmp_path / "again").eval()
    for folder in (run / "export", tmp_path / "merged", tmp_path / "again"):  # the template's end, beside the base's
        stops = {0, AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")}
        assert {*GenerationConfig.from_pretrained(folder).eos_token_id} == stops
    want = logits_of(model, tiny)
    assert metrics(run)[-1]["eval/loss"] == pytest.approx(held_out_loss(model, recipe, tiny), rel=TOLERANCE)
    assert torch.equal(logits_of(again, tiny), want)
    assert (logits_of(merged, tiny) - want).norm() < 1e-6 * want.norm()
    assert (logits_of(plain_model(tiny, kind), tiny) - want).abs().max() > 1e-3  # it does something
    shapes = json.loads((run / "checkpoints" / "step-000002" / "state.json").read_text())["shapes"]
    assert all("lora" in name or name == "lm_head.weight" for name in shapes)


def test_an_adapter_of_pefts_is_gone_on_with(recipe, tiny, adapters, tmp_path):
    """The same first loss as peft's own, and after a merge of what was trained."""
    run = run_train(1, recipe, "first", "train.steps=1", *words_of("all", adapters))
    model = peft.PeftModel.from_pretrained(plain_model(tiny, "all"), adapters / "all")
    parts = [reference.document_loss(model, document) for document in documents_of_steps(recipe, tiny, 1)[0]]
    want = sum(part for part, _ in parts) / sum(count for _, count in parts)
    assert losses(run)[0] == pytest.approx(want.item(), rel=TOLERANCE)


def test_resume_is_bitwise_and_another_base_is_refused(recipe, tiny, tmp_path):
    """Also with dropout inside recomputed blocks."""
    base = tmp_path / "base"
    shutil.copytree(tiny / "model", base)
    words = ("lora.r=4", "lora.lora_dropout=0.2", "activation.checkpointing=full", f"model.path={base}")
    saving = ("train.save_steps=2", "optim.lr_scheduler_type=constant")
    run_train(2, recipe, "parts", "train.steps=2", *saving, *words)
    straight = run_train(2, recipe, "whole", "train.steps=4", *saving, *words)
    resumed = run_train(2, recipe, "parts", "train.steps=4", *saving, *words)
    assert losses(resumed)[-2:] == losses(straight)[-2:]
    weights = next(base.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert "holds adapters of another base model" in refusal(recipe, "run.name=parts", "train.steps=5", *words)


def refusal(recipe, *words: str) -> str:
    """The one line that one rank ends with, exit code 2."""
    ((code, _, said),) = run_world(1, train_rank, [str(recipe), "run.name=refused", "train.steps=1", *words])
    assert code == 2 and said.startswith("shardbook: ") and said.count("\n") == 1
    return said


REFUSED = {
    "lora.lora_alpha=8": "r = 0 and lora_alpha is set",
    "lora.r=4 lora.target_modules=[qproj]": "'qproj' is no linear map of a block",
    "lora.r=4 lora.target_modules=[lm_head]": "train it whole with lora.modules_to_save",
    "lora.r=4 lora.modules_to_save=[lm_head]": "is tied to another",
    "lora.r=4 lora.modules_to_save=[head]": "must be one of",
    "lora.r=4 lora.adapter=/nowhere": "lora.adapter = '/nowhere': no such directory",
    "lora.r=4 offload.optimizer=cpu": "the state of adapters is small",
    "precision.frozen=bf16": "nothing is frozen",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(words, recipe):
    assert REFUSED[words] in refusal(recipe, *words.split())


def test_an_adapter_of_another_rank_names_the_key(recipe, adapters):
    words = [word for word in words_of("all", adapters) if "lora.r=" not in word]
    assert "set lora.r=4" in refusal(recipe, "lora.r=8", *words)


def alpha_alone():
    from shardbook.model.adapters import LoraLinear

    right = LoraLinear.adapt

    def adapt(self, lora, dtype):
        right(self, lora, dtype)
        self.scaling = lora.lora_alpha

    LoraLinear.adapt = adapt


def swapped_in_export():
    from shardbook.run.result import export

    right = export.full_trained

    def swapped(*given):
        for name, tensor in right(*given):
            other = {"lora_A": "lora_B", "lora_B": "lora_A"}
            word = next((word for word in other if word in name), None)
            yield (name.replace(word, other[word]), tensor.T) if word else (name, tensor)

    export.full_trained = swapped


def dropped_anew():
    from shardbook.memory.activation import apply_checkpointing

    replace(apply_checkpointing, lambda blocks, activation, is_random: apply_checkpointing(blocks, activation, False))


def any_base():
    from shardbook.model.causal_lm import CausalLM

    CausalLM.frozen_identities = property(lambda model: {})


def planted(bug, calls):
    """One rank, with the bug: what run_cases, or train_rank, makes of each of `calls`."""
    bug()
    return [call(*words) for call, *words in calls]


def test_planted_alpha_in_place_of_its_share(recipe, tiny, adapters, tmp_path, wanted_of):
    case = Case("zero3", 1, 1, extra=words_of("all", adapters))
    run_world(1, planted, alpha_alone, [(run_cases, recipe, tiny, [case], tmp_path)])
    with pytest.raises(AssertionError, match=r"e-|losses|gradient"):
        assert_case(case, outcomes_of(case, tmp_path), wanted_of(case, "all"))


@pytest.mark.slow
def test_planted_swap_in_export(recipe, tiny, adapters):
    words = [str(recipe), "run.name=swapped", "train.steps=1", "train.export=true", *words_of("all", adapters)]
    run_world(1, planted, swapped_in_export, [(train_rank, words)])
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(plain_model(tiny, "all"), recipe.parent / "swapped" / "export")


@pytest.mark.slow
def test_planted_dropout_without_its_random_state(recipe, tiny, adapters, tmp_path):
    extra = (*words_of("all", adapters), "lora.lora_dropout=0.5")
    cases = [Case("zero3", 1, 1, checkpointing=kind, extra=extra) for kind in ("none", "full")]
    assert run_world(1, run_cases, recipe, tiny, cases, tmp_path) == [[]]
    kept, recomputed = (outcomes_of(case, tmp_path)[0].result for case in cases)
    assert same_bits(kept, recomputed)
    (tmp_path / "planted").mkdir()
    run_world(1, planted, dropped_anew, [(run_cases, recipe, tiny, cases[1:], tmp_path / "planted")])
    assert not same_bits(kept, outcomes_of(cases[1], tmp_path / "planted")[0].result)


@pytest.mark.slow
def test_planted_resume_on_any_base(recipe, tiny, tmp_path):
    """It goes on, where the test of the refusal wants exit code 2."""
    base = tmp_path / "base"
    shutil.copytree(tiny / "model", base)
    words = [str(recipe), "run.name=any", "lora.r=4", f"model.path={base}", "train.save_steps=1"]
    for steps in (1, 2):
        (((code, _, _),),) = run_world(1, planted, any_base, [(train_rank, [*words, f"train.steps={steps}"])])
        assert code == 0
        weights = next(base.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")


@pytest.mark.slow
def test_secondary_shards_and_a_base_in_another_dtype(recipe, tiny, adapters, tmp_path):
    """hpZ is zero3 bit for bit; a bf16 base under fp32 compute is the same on every stage."""
    words = words_of("all", adapters)
    hpz = Case("zeropp", 1, 4, 3, extra=(*words, "parallel.secondary_shard=2"))
    plain = Case("zero3", 1, 4, 3, extra=words)
    assert run_world(4, run_cases, recipe, tiny, [hpz, plain], tmp_path) == [[]] * 4
    assert same_bits(outcomes_of(hpz, tmp_path)[0].result, outcomes_of(plain, tmp_path)[0].result)
    low = (*words, "precision.frozen=bf16")
    cases = [Case(stage, *((2, 1) if stage == "ddp" else (1, 2)), extra=low) for stage in ("ddp", "zero2", "zero3")]
    assert run_world(2, run_cases, recipe, tiny, cases, tmp_path) == [[], []]
    first, *others = [outcomes_of(case, tmp_path)[0] for case in cases]
    assert all(same_bits(first.result, other.result) for other in others)
    for outcome in (first, *others):
        assert outcome.traffic[0] == outcome.traffic[1] and outcome.memory[0] == outcome.memory[1]
