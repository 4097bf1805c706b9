"""Samples while training: the tokens of transformers' generate on the same weights, and training does not notice."""

import hashlib
import json
import shutil

import pytest
import reference
import torch
from families import write_family
from live import SettledBytes
from planted import replace
from tiny import tokenizer, write_model
from torch.distributed.tensor import DTensor
from traced import traced
from world import losses, run_train, run_world, train_rank

NEW = 12
GENERATES = (
    "generate.steps=2",
    "generate.samples=3",
    f"generate.max_new_tokens={NEW}",
    "train.steps=3",
    "data.eval_size=4",
)
ZERO3 = "parallel.stage=zero3"


def run_all(recipe, runs):
    """On each rank: train each of `runs` (a name and words). Of each run the tokens of its samples by step, this rank's
    weights at the end, and how often it gathered for its samples. Settings and parameters are left as they were."""
    from shardbook import train
    from shardbook.comm.ledger import Ledger
    from shardbook.parallel.sharding import apply_stage
    from shardbook.ranks.distributed import start_distributed
    from shardbook.recipe import load_recipe
    from shardbook.run.eval import generate

    ranks, said = start_distributed(), {}
    for name, words in runs.items():
        seen = {"tokens": {}, "prompts": None, "stops": None, "gathers": set()}
        real = generate.Generation._continue

        def spy(samples, step, seen=seen, real=real):
            before = settings_of(samples.sharded), torch.get_rng_state()
            ledger = Ledger(samples.sharded.layout.groups(ranks.rank))
            ledger.open()
            seen["tokens"][step] = real(samples, step)
            ledger.close()
            gathers = ledger.traffic.get(("all_gather", "dp_shard"))
            seen["gathers"].add(gathers.calls if gathers else 0)
            seen["prompts"], seen["stops"] = samples.job.prompts.ids, samples.job.prompts.stops
            assert settings_of(samples.sharded) == before[0] and torch.equal(torch.get_rng_state(), before[1])
            assert all(parts_whole(samples.sharded)), "parameters are left gathered"
            assert samples.sharded.model.training
            return seen["tokens"][step]

        def apply_seen(*given, seen=seen):
            seen["sharded"] = apply_stage(*given)
            return seen["sharded"]

        generate.Generation._continue = spy
        replace(apply_stage, apply_seen)
        recipe_of_run = load_recipe(recipe, [*words, f"run.name={name}"])
        try:
            assert train.train(recipe_of_run, recipe, ranks) == 0
        finally:
            generate.Generation._continue = real
            replace(apply_seen, apply_stage)
        said[name] = {key: seen[key] for key in ("tokens", "prompts", "stops", "gathers")} | {
            "weights": digest(seen["sharded"])
        }
    return said


def settings_of(sharded):
    """What fully_shard was told of each unit."""
    found = []
    for unit in (unit for part in sharded.chunks if not part.replicated for unit in part.layout.units):
        state = unit.handle._get_fsdp_state()
        ahead = [len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch)]
        every = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch before 2.13 has one
        groups = [(g.post_forward_mesh_info is None, g._reshard_after_forward) for g in every if g]
        found.append((ahead, groups))
    return found


def parts_whole(sharded):
    """Whether each parameter lies as it does between steps."""
    at_rest = torch.nn.Parameter if any(part.replicated for part in sharded.chunks) else DTensor
    return [isinstance(parameter, at_rest) for parameter in sharded.model.parameters()]


def digest(sharded):
    words = []
    for name, parameter in sharded.masters.named_parameters():
        local = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().contiguous()
        words.append((name, hashlib.sha256(local.flatten().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()))
    return words


def generated(model, prompts, stops, new=NEW):
    """What transformers makes of each prompt, alone and so without padding."""
    found = []
    for ids in prompts:
        given = torch.tensor([ids])
        settings = {"do_sample": False, "max_new_tokens": new, "eos_token_id": stops, "pad_token_id": 0}
        found.append(model.generate(given, attention_mask=torch.ones_like(given), **settings)[0, len(ids) :].tolist())
    return found


def plain(folder):
    return reference.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def assert_tokens(recipe, said, names, source):
    """Samples of step 0 are those of the model in `source`, samples of the last step those of the exported one."""
    for name in names:
        one = said[0][name]
        assert len({len(ids) for ids in one["prompts"]}) > 1, "prompts are of one length"
        assert {0, 3} <= one["tokens"].keys() <= {0, 2, 3}
        for step, folder in ((0, source), (3, recipe.parent / name / "export")):
            assert one["tokens"][step] == generated(plain(folder), one["prompts"], one["stops"]), (name, step)


def test_tokens_are_those_of_transformers(recipe, tiny):
    """Three prompts over two ranks, gathered once for twelve tokens: a gather a unit."""
    runs = {"zero3": (ZERO3, f"model.path={tiny / 'untied'}"), "ddp": ("parallel.stage=ddp", "model.attention=eager")}
    said = run_world(2, run_all, recipe, {name: (*GENERATES, *words) for name, words in runs.items()})
    assert_tokens(recipe, said, ["zero3"], tiny / "untied")
    assert_tokens(recipe, said, ["ddp"], tiny / "model")
    assert said[1]["zero3"]["gathers"] == {5} and said[1]["ddp"]["gathers"] == {0}


FURTHER = {  # ranks, words
    "zero2": (2, ("parallel.stage=zero2", "activation.checkpointing=full")),
    "zero3": (2, (ZERO3, "model.attention=eager")),
    "ddp": (2, ("parallel.stage=ddp", "activation.checkpointing=full")),
    "hsdp": (
        4,
        ("parallel.stage=hsdp", "parallel.dp_shard_size=2", "model.attention=eager", "activation.checkpointing=full"),
    ),
    "hpZ": (4, ("parallel.stage=zeropp", "parallel.secondary_shard=2")),
    "zero1": (3, ("parallel.stage=zero1", "activation.checkpointing=selective")),
    "ahead": (2, (ZERO3, "parallel.forward_prefetch=2")),
    "host": (2, (ZERO3, "offload.optimizer=cpu", "offload.params=cpu")),
    "disk": (2, (ZERO3, "offload.optimizer=nvme", "offload.params=nvme")),
    "host-tp": (2, ("parallel.tp_size=2", "offload.optimizer=cpu", "offload.params=cpu")),
    "host-pp": (2, ("parallel.pp_size=2", "offload.optimizer=cpu")),
    "inputs": (2, (ZERO3, "offload.activations=cpu", "activation.checkpointing=full")),
    "alone": (1, ("parallel.stage=zero3",)),
    "unpacked": (2, (ZERO3, "data.packing=false", "generate.temperature=0.0")),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_further_layouts(ranks, recipe, tiny, tmp_path):
    disk = (f"offload.path={tmp_path}",)
    runs = {
        f"{name}-{kind}": (*GENERATES, f"model.path={tiny / kind}", *words, *disk * (name == "disk"))
        for name, (world, words) in FURTHER.items()
        if world == ranks
        for kind in ("model", "untied")
    }
    said = run_world(ranks, run_all, recipe, runs)
    for kind in ("model", "untied"):
        assert_tokens(recipe, said, [name for name in runs if name.endswith(kind)], tiny / kind)


AXES = {  # ranks, words
    "tp": (2, ("parallel.tp_size=2",)),
    "cp": (2, ("parallel.cp_size=2",)),
    "pp": (2, ("parallel.pp_size=2",)),
    "tp3": (3, ("parallel.tp_size=3", "data.max_length=192")),  # four heads, and 259 tokens, on three ranks
    "tp-pp": (4, ("parallel.tp_size=2", "parallel.pp_size=2", "activation.checkpointing=full")),
    "cp-tp": (4, ("parallel.tp_size=2", "parallel.cp_size=2", "parallel.stage=zero1")),
    "cp-pp": (4, ("parallel.pp_size=2", "parallel.cp_size=2", "parallel.stage=ddp")),
    "dp-pp": (4, ("parallel.pp_size=2", "data.packing=false")),
}


def test_ranks_that_share_a_model_continue_as_one(recipe, tiny):
    """Matrices, heads or layers on two ranks."""
    runs = {name: (*GENERATES, f"model.path={tiny / 'untied'}", *words) for name, (n, words) in AXES.items() if n == 2}
    said = run_world(2, run_all, recipe, runs)
    assert_tokens(recipe, said, runs, tiny / "untied")
    assert all(said[1][name]["tokens"] == said[0][name]["tokens"] for name in runs)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_that_share_a_model_continue_as_one(ranks, recipe, tiny):
    """Two axes at once, heads that do not divide, and a tied weight."""
    runs = {name: (*GENERATES, *words) for name, (n, words) in AXES.items() if n == ranks}
    said = run_world(ranks, run_all, recipe, runs)
    assert_tokens(recipe, said, runs, tiny / "model")


@pytest.mark.slow
def test_chunks_of_layers_continue_as_one(recipe, models):
    looped = ("parallel.pipeline_schedule=interleaved", "parallel.pipeline_chunks=2")
    words = ("parallel.pp_size=2", *looped, "train.gradient_accumulation_steps=2", "parallel.stage=zero3")
    runs = {"chunks": (*GENERATES, f"model.path={models / 'deep'}", *words)}
    assert_tokens(recipe, run_world(2, run_all, recipe, runs), runs, models / "deep")


def drawn_by_each_stage(recipe, runs):
    """Planted bug: a rank before the last stage goes on with tokens of its own."""
    from shardbook.parallel.pipeline import PipelineLinks

    PipelineLinks.from_last_stage = lambda links, tokens: tokens
    return run_all(recipe, runs)


def test_tokens_of_the_first_stage_turn_it_red(recipe, tiny):
    runs = {"pp-planted": (*GENERATES, "parallel.pp_size=2")}
    said = run_world(2, drawn_by_each_stage, recipe, runs)
    with pytest.raises(AssertionError, match="pp-planted"):
        assert_tokens(recipe, said, runs, tiny / "model")


TRAINS = {
    "zero3": (ZERO3, "train.gradient_accumulation_steps=2", "lora.r=4", "lora.lora_dropout=0.2"),
    "ddp": ("parallel.stage=ddp", "precision.params=bf16"),
    "zero2": ("parallel.stage=zero2", "activation.checkpointing=full", "parallel.forward_prefetch=1"),
    "host": (ZERO3, "offload.optimizer=cpu", "offload.params=cpu", "data.packing=false"),
    "zeropp": ("parallel.stage=zeropp", "parallel.quantize_weights=8", "parallel.quantize_gradients=[8, 4]"),
}
DRAWS = ("generate.steps=1", "generate.temperature=0.8", "generate.max_new_tokens=5", "generate.samples=3")


def with_and_without(recipe, names, *more):
    words = ("train.steps=4", "train.eval_steps=2", "train.export=false", "data.eval_size=4", *more)
    pairs = {name: (f"without-{name}-{len(more)}", f"with-{name}-{len(more)}") for name in names}
    runs = {pair[0]: (*words, *TRAINS[name]) for name, pair in pairs.items()}
    runs |= {pair[1]: (*words, *TRAINS[name], *DRAWS) for name, pair in pairs.items()}
    said = run_world(2, run_all, recipe, runs)
    for without, does in pairs.values():
        assert losses(recipe.parent / does) == losses(recipe.parent / without)
        for rank in said:
            assert rank[does]["weights"] == rank[without]["weights"], does
    return [said[0][does]["tokens"] for _, does in pairs.values()]


def test_training_does_not_notice(recipe):
    """To the bit, with dropout's own random numbers between; and what is drawn differs by step."""
    (tokens,) = with_and_without(recipe, ["zero3"])
    assert sorted(tokens) == [0, 1, 2, 3, 4]
    assert all(len(set(map(tuple, found))) == 3 for found in tokens.values())
    assert tokens[1] != tokens[2]


@pytest.mark.slow
def test_training_does_not_notice_elsewhere(recipe):
    with_and_without(recipe, [name for name in TRAINS if name != "zero3"])


@pytest.mark.slow
def test_compiled_blocks_generate_uncompiled(recipe, tiny):
    compiled = ("train.compile=true", ZERO3, *GENERATES[3:])
    runs = {"compiled": (*compiled, *GENERATES[:3]), "compiled-without": compiled}
    said = run_world(2, traced, run_all, recipe, runs)
    assert_tokens(recipe, said, ["compiled"], tiny / "model")
    assert losses(recipe.parent / "compiled") == losses(recipe.parent / "compiled-without")
    assert all(rank["compiled"]["weights"] == rank["compiled-without"]["weights"] for rank in said)


@pytest.mark.slow
def test_any_number_of_ranks_draws_the_same(recipe):
    """Five samples on one, two and three ranks."""
    words = (
        "train.steps=1",
        "data.eval_size=5",
        "generate.steps=1",
        "generate.temperature=1.5",
        "generate.samples=5",
        "generate.max_new_tokens=8",
    )
    found = [run_world(n, run_all, recipe, {f"on-{n}": (*words, ZERO3)})[0][f"on-{n}"]["tokens"][0] for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2] and len(set(map(tuple, found[0]))) == 5


SHAPE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}  # whole blocks of 64


@pytest.mark.slow
@pytest.mark.parametrize("four", [False, True], ids=["lora", "qlora"])
def test_adapters_over_a_base(four, recipe, tmp_path):
    """Those of transformers with peft, the base rounded by an independent NF4; at the end with the adapter exported."""
    peft = pytest.importorskip("peft")
    source = write_model(tmp_path / "model", tied=False, **SHAPE)
    base = plain(source)
    if four:
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                if ".layers." in name and parameter.ndim == 2:
                    parameter.copy_(reference.nf4(parameter))
        base.save_pretrained(tmp_path / "rounded")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    words = (
        *GENERATES,
        "lora.r=4",
        "lora.lora_alpha=8",
        f"lora.adapter={tmp_path / 'adapter'}",
        f"model.path={source}",
    )
    words += ("model.load_in_4bit=true",) * four
    stages = ("zero3", "zero2", "ddp")
    runs = {f"{stage}-{four}": (*words, f"parallel.stage={stage}", "activation.checkpointing=full") for stage in stages}
    said = run_world(2, run_all, recipe, runs)
    for name in runs:
        one = said[0][name]
        for step, adapter in ((0, tmp_path / "adapter"), (3, recipe.parent / name / "export")):
            model = peft.PeftModel.from_pretrained(plain(tmp_path / "rounded" if four else source), adapter)
            assert one["tokens"][step] == generated(model, one["prompts"], one["stops"]), (name, step)


@pytest.mark.slow
@pytest.mark.newest
def test_families(recipe, tmp_path):
    families = ("qwen3", "olmo2", "smollm3", "granite", "phi3")
    sources = {family: write_model(tmp_path / family, family, tied=False) for family in families}
    runs = {family: (*GENERATES, ZERO3, f"model.path={source}") for family, source in sources.items()}
    # what keeps a state in place of keys, or beside them
    for family in ("qwen3_next", "lfm2", "mamba2"):
        sources[family] = write_family(tmp_path / family, family)
        runs[family] = (*GENERATES, ZERO3, f"model.path={sources[family]}", "data.packing=false")
    said = run_world(2, run_all, recipe, runs)
    for family, source in sources.items():
        assert_tokens(recipe, said, [family], source)


def stale(recipe, runs):
    """Planted bug: what was gathered before a step stays."""
    from bugs import in_each_micro_batch

    in_each_micro_batch(lambda units: [unit.handle.set_reshard_after_backward(False, recurse=False) for unit in units])
    return run_all(recipe, runs)


@pytest.mark.slow
def test_samples_of_stale_weights_turn_the_suite_red(recipe, tiny):
    # without an evaluation, and at the end alone: both free what is gathered
    words = (*GENERATES, "parallel.stage=zero2", "data.eval_size=0", "generate.steps=9", "optim.learning_rate=1e-2")
    assert_tokens(recipe, run_world(2, run_all, recipe, {"fresh": words}), ["fresh"], tiny / "model")
    said = run_world(2, stale, recipe, {"stale": words})
    with pytest.raises(AssertionError, match="'stale', 3"):
        assert_tokens(recipe, said, ["stale"], tiny / "model")


def samples_of(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().split("\n") if line]


@pytest.mark.slow
def test_a_resumed_run_repeats_its_samples(recipe, tiny):
    """It drops those of steps that it takes again, and what was cut off; drawn again they are the same."""
    words = ("train.steps=4", "train.save_steps=2", "train.export=false", "data.eval_size=4", *DRAWS)
    straight = run_train(2, recipe, "straight", *words)
    samples = samples_of(straight)
    assert [sample["step"] for sample in samples] == [step for step in range(5) for _ in range(3)]
    assert list(samples[0]) == ["step", "prompt", "completion", "tokens"] and samples[0]["tokens"] == 5
    assert samples[0]["prompt"].startswith("<|im_start|>user") and samples[0]["prompt"].endswith("assistant\n")
    run = recipe.parent / "again"
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("step-000004", "run.json"))
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"step": 4, "pro')
    assert run_train(2, recipe, "again", *words) == run
    assert samples_of(run) == samples
    shutil.rmtree(run / "checkpoints")
    (run / "run.json").unlink()
    run_train(1, recipe, "again", "train.steps=1", "train.export=false")  # from the beginning, and without
    assert samples_of(run) == []


def test_an_answer_ends_where_the_model_says(recipe, tiny, tmp_path):
    """At any of generation_config.json's ends, or the template's."""
    words = (
        "train.steps=1",
        "train.export=false",
        "generate.steps=1",
        "generate.max_new_tokens=12",
        "generate.samples=2",
    )
    free = run_world(1, run_all, recipe, {"free": words})[0]["free"]
    assert [len(tokens) for tokens in free["tokens"][0]] == [12, 12] and free["stops"] == [0, 258]
    end = free["tokens"][0][1][2]
    shutil.copytree(tiny / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, end]}))
    one = run_world(1, run_all, recipe, {"ends": (*words, f"model.path={tmp_path / 'model'}")})[0]["ends"]
    assert one["stops"] == sorted([7, end, 258])
    assert one["tokens"][0] == generated(plain(tiny / "model"), one["prompts"], one["stops"])
    assert one["tokens"][0][1] == free["tokens"][0][1][: free["tokens"][0][1].index(end) + 1]
    said = [sample for sample in samples_of(recipe.parent / "ends") if sample["step"] == 0][1]
    assert said["completion"] == tokenizer().decode(one["tokens"][0][1][:-1]) and said["tokens"] == len(
        one["tokens"][0][1]
    )


@pytest.mark.slow
def test_prompts_of_ones_own(recipe, tiny, tmp_path):
    """Through the chat template; without one as text, and then rows hold no prompt."""
    asked = ["why", "tell me more about the quick brown fox"]
    words = ("train.steps=1", "train.export=false", "generate.steps=1", "generate.max_new_tokens=4")
    given = f"generate.prompts={json.dumps(asked)}"
    one = run_world(2, run_all, recipe, {"chat": (*words, given)})[0]["chat"]
    chat = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked]
    assert [tokenizer().decode(ids) for ids in one["prompts"]] == chat
    assert one["tokens"][0] == generated(plain(tiny / "model"), one["prompts"], one["stops"], 4)
    tokenizer(None).save_pretrained(tmp_path / "plain")
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(8) for text in asked)
    )
    words = (*words, f"model.tokenizer={tmp_path / 'plain'}", f"data.train={tmp_path / 'text.jsonl'}")
    one = run_world(1, run_all, recipe, {"text": (*words, given)})[0]["text"]
    assert one["prompts"] == [tokenizer()(text)["input_ids"] for text in asked]
    ((code, _, said),) = run_world(1, train_rank, [str(recipe), "run.name=none", *words])
    assert code == 2 and said.count("\n") == 1 and "generate.samples = 4: rows of text have no prompt" in said
    ((code, out, _),) = run_world(
        1, train_rank, [str(recipe), "run.name=long", *words[:3], given, "generate.max_new_tokens=90"]
    )
    assert code == 0 and "samples  1 of 2 prompts left out: the longest has " in out
    assert "leaves no room for generate.max_new_tokens = 90 in data.max_length = 128\n" in out.replace("\n ", " ")
    assert {sample["prompt"] for sample in samples_of(recipe.parent / "long")} == {chat[0]}


SMOLLM2 = {  # SmolLM2-135M, with 2 of its 30 layers
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def measure(stages, words):
    """Of each of `stages`: bytes that generating makes at most, beside what is kept, and bytes predicted."""
    import torch.distributed as dist
    from transformers import AutoConfig

    from shardbook.cli import PLAIN
    from shardbook.model.causal_lm import build_model, materialize
    from shardbook.model.weights import init_weights
    from shardbook.parallel.layout import build_layout
    from shardbook.parallel.mesh import build_mesh
    from shardbook.parallel.sharding import apply_stage
    from shardbook.plan.peak import predict_fullest, predict_generation
    from shardbook.plan.simulate import _optimizer_state
    from shardbook.recipe import parse_recipe
    from shardbook.run.eval.generate import decode, pick

    dist.init_process_group("gloo")
    found = {}
    for stage in stages:
        recipe = parse_recipe(
            PLAIN, "test", ["model.path=test", f"parallel.stage={stage}", "precision.params=bf16", *words]
        )
        config = AutoConfig.for_model("llama", **SMOLLM2)
        model = build_model(config, recipe.at_rest)
        layout = build_layout(recipe.parallel, recipe.precision, model, model.parts, model.blocks, 2, 2)
        said = predict_generation(layout, config, recipe)
        sharded, live = apply_stage(model, layout, build_mesh(layout.sizes, "cpu")), SettledBytes(1.01 * said.total)
        length, new = recipe.data.max_length, recipe.generate.max_new_tokens
        with live:
            materialize(model, torch.device("cpu"))
            init_weights(model, 0)
            state = _optimizer_state(model, "adamw")
            live.most = {}
            # a row of padding, so that there is a mask
            prompts = [[1] * (length - new), [1] * (length - new - 5)]
            decode(
                sharded,
                prompts,
                length - new,
                [],
                new,
                lambda logits, turn: pick(logits.float(), 0, None),
                torch.device("cpu"),
            )
            del state
        found[stage] = max(live.most.values()), said.total
        assert predict_fullest(layout, config, recipe).total >= said.total
    return found


@pytest.mark.slow
def test_generating_takes_what_is_predicted():
    words = (
        "generate.steps=1",
        "generate.samples=4",
        "generate.max_new_tokens=4",
        "data.max_length=64",
        "precision.master=fp32",
    )
    for found in run_world(2, measure, ("zero3", "ddp", "zero2"), words):
        off = {stage: f"{said / made - 1:+.2%}" for stage, (made, said) in found.items()}
        assert all(abs(said / made - 1) < 0.01 for made, said in found.values()), (off, found)
