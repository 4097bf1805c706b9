"""What moves on a GPU between streams, threads, host and disk: offload, packed bytes, samples, other objectives and
optimizers, and runs in which freed memory is given back at once. The same files run under the stand-in: --streams."""

import hashlib
import os

import pytest
import torch
from cases import Case, assert_exact_bytes, outcomes_of, run_cases, whole
from planted import replace
from test_cuda import TOLERANCE, TOLERANCE_BF16, over_gloo
from tiny import write_pairs
from world import STREAMS, losses, metrics, run_train, run_world, train_rank

FP32 = ("precision.params=fp32", "precision.reduce=fp32")
SHORT = ("train.steps=5", "train.gradient_accumulation_steps=4", "optim.max_grad_norm=0.5", *FP32)


@pytest.fixture(scope="module", autouse=True)
def cuda():
    if not torch.cuda.is_available() and STREAMS not in os.environ:
        pytest.exit("the GPU tests need a CUDA device; there is none here", returncode=2)


@pytest.fixture(scope="module")
def kept(recipe):
    """Everything on the device: twenty micro-batches."""
    return run_train(1, recipe, "kept", *SHORT)


TIERS = {
    "cpu": ("offload.optimizer=cpu",),
    "cpu-cpu": ("offload.optimizer=cpu", "offload.params=cpu"),
    "nvme": ("offload.optimizer=nvme",),
    "nvme-nvme": ("offload.optimizer=nvme", "offload.params=nvme"),
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("world", [1, 2])
def test_offload_beside_none(world, tier, recipe, kept, tmp_path):
    """The host's AdamW adds and roots as the device's does, to the last bits."""
    words = [str(recipe), f"run.name={tier}-{world}", *SHORT, *TIERS[tier]]
    words += [f"train.gradient_accumulation_steps={4 // world}", *[f"offload.path={tmp_path}"] * ("nvme" in tier)]
    found = run_world(1, train_rank, words) if world == 1 else run_world(2, over_gloo, train_rank, words)
    assert [code for code, *_ in found] == [0] * world, found
    assert losses(recipe.parent / f"{tier}-{world}") == pytest.approx(losses(kept), rel=TOLERANCE)


@pytest.mark.parametrize("checkpointing", ["full", "every:2"])
def test_inputs_that_leave_come_back_bitwise(checkpointing, recipe):
    words = (*SHORT, f"activation.checkpointing={checkpointing}", "train.deterministic=true")
    name = f"inputs-{checkpointing.replace(':', '-')}"
    here, away = (run_train(1, recipe, name + end, *words, *more) for end, more in (("", ()), ("-away", AWAY)))
    assert losses(here) == losses(away)


AWAY = ("offload.activations=cpu",)
LORA = ("lora.r=4", "model.load_in_4bit=true")


def packed_bytes(words):
    """Digests of the packed bytes that products met on this rank, and of those at rest."""
    from shardbook.model.adapters import packed_product
    from shardbook.parallel.sharding import apply_stage
    from shardbook.ranks.distributed import stop_distributed

    met, at_rest, seen = set(), set(), {}

    def digest(tensor):
        plain = tensor.detach().cpu().contiguous().view(torch.uint8).flatten()
        return hashlib.sha256(plain.numpy().tobytes()).hexdigest()

    def multiply_seen(module, *given):
        met.add(digest(module.weight_packed))
        return packed_product(module, *given)

    def apply_seen(model, *given):
        seen["model"] = model
        return apply_stage(model, *given)

    def stop_seen(ranks):
        named = seen["model"].named_parameters()
        at_rest.update(digest(whole(p)) for name, p in named if name.endswith("weight_packed"))
        stop_distributed(ranks)

    replace(packed_product, multiply_seen)
    replace(apply_stage, apply_seen)
    replace(stop_distributed, stop_seen)
    assert train_rank(words)[0] == 0
    return met, at_rest


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_packed_bytes_are_gathered_as_they_are(stage, recipe, tmp_path):
    """A GPU's copy of bf16 rewrites NaNs; the tests' tiny model has widths that are no blocks, so a wider one."""
    from tiny import write_model

    wide = write_model(tmp_path / "wide", hidden_size=64, intermediate_size=128, head_dim=16)
    words = [str(recipe), f"run.name=packed-{stage}", f"model.path={wide}", *LORA, f"parallel.stage={stage}"]
    words += ["precision.params=bf16", "train.steps=1", "train.export=false"]
    for met, at_rest in run_world(2, over_gloo, packed_bytes, words):
        assert met == at_rest and len(met) > 3


@pytest.mark.parametrize("case", [Case("hsdp", 2, 1, 3), Case("hsdp", 1, 2, 3), Case("zeropp", 1, 2, 3)], ids=str)
def test_other_stages_in_bf16_stay_near(case, recipe, tiny, tmp_path, wanted):
    extra = ("precision.params=bf16", *("parallel.quantize_weights=8",) * (case.stage == "zeropp"))
    case = Case(case.stage, case.replicas, case.shards, case.micros, extra=extra)
    run_world(2, over_gloo, run_cases, recipe, tiny, [case], tmp_path)
    outcomes = outcomes_of(case, tmp_path)
    assert outcomes[0].result.losses == pytest.approx(wanted(case).losses, rel=4 * TOLERANCE_BF16)
    assert_exact_bytes(outcomes)


@pytest.mark.parametrize("name", ["adamw", "adamw_bf16", "adamw_8bit", "lion", "muon"])
def test_two_steps_of_an_optimizer_beside_a_cpu(name, recipe):
    if name == "adamw_8bit":
        pytest.importorskip("torchao", reason="adamw_8bit needs torchao")
    words = ("train.steps=3", f"optim.name={name}", "optim.learning_rate=1e-3", *FP32)
    on_gpu = run_train(1, recipe, f"{name}-gpu", *words)
    on_cpu = run_train(1, recipe, f"{name}-cpu", *words, environment={"CUDA_VISIBLE_DEVICES": ""})
    # steps whose size is the sign's, or of few bits, differ where two devices' gradients round to other sides of zero
    bound = TOLERANCE if name == "adamw" else 1e-2
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=bound)


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_samples_are_drawn_at_a_temperature(deterministic, recipe):
    words = ("generate.steps=1", "generate.samples=2", "generate.max_new_tokens=4", "generate.temperature=0.7")
    words += ("train.steps=1", f"train.deterministic={deterministic}", *FP32)
    run = run_train(1, recipe, f"samples-{deterministic}", *words)
    assert (run / "samples.jsonl").read_text().count("\n") == 4


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 16)


@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo", "reward"])
def test_pairs(method, recipe, pairs):
    words = (f"method={method}", f"data.train={pairs}", "train.steps=3", *FP32)
    run = run_train(1, recipe, method, *words)
    assert len(losses(run)) == 3 and all(row["train/grad_norm"] > 0 for row in metrics(run) if "train/loss" in row)


def test_adapters_that_drop_something_go_on_bitwise(recipe):
    words = ("lora.r=4", "lora.lora_dropout=0.2", "train.save_steps=2", "train.deterministic=true", *FP32)
    straight = run_train(1, recipe, "drops", *words, "train.steps=4")
    run_train(1, recipe, "drops-parts", *words, "train.steps=2")
    assert losses(run_train(1, recipe, "drops-parts", *words, "train.steps=4")) == losses(straight)


def test_nothing_lies_on_the_first_gpu_but_its_own_ranks(recipe, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    words = [str(recipe), "run.name=two", "train.steps=3", "offload.optimizer=nvme", "offload.params=nvme"]
    used = run_world(2, memory_of_the_first, [*words, f"offload.path={tmp_path}", *FP32])
    assert max(used) < 200 * 2**20  # a context alone takes 400 MB or more


def memory_of_the_first(words):
    """Bytes of GPU 0 that came while this rank, which is another one's, trained; 0 on rank 0."""
    before = torch.cuda.mem_get_info(0)[0] if os.environ["RANK"] == "1" else 0
    assert train_rank(words)[0] == 0
    return 0 if os.environ["RANK"] == "0" else max(0, before - torch.cuda.mem_get_info(0)[0])


@pytest.mark.parametrize("words", [(), ("offload.optimizer=cpu", "offload.params=cpu"), AWAY], ids=str)
def test_memory_that_is_given_back_at_once_changes_nothing(words, recipe, kept):
    """Without a cache each freed block is the driver's again: a read of it is an error, or other numbers."""
    more = ("activation.checkpointing=full",) * (words == AWAY)
    name = f"uncached-{len(words)}-{'-'.join(words)[:12].replace('.', '-').replace('=', '-')}"
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = run_train(1, recipe, name, *SHORT, *words, *more, environment=environment)
    assert losses(run) == pytest.approx(losses(kept), rel=TOLERANCE)


@pytest.mark.parametrize("name", ["distill", "qgZ"])
def test_two_ranks_whose_memory_is_given_back_at_once(name, recipe, tiny):
    """A teacher beside the student, and gradients that are quantised."""
    words = [str(recipe), "train.steps=4", "train.gradient_accumulation_steps=2", "train.deterministic=true", *FP32]
    words += {
        "distill": ["method=distill", f"distill.teacher={tiny / 'model'}", "parallel.stage=zero3"],
        "qgZ": ["parallel.stage=zeropp", "parallel.quantize_gradients=[8,4]"],
    }[name]
    for end, environment in (("", {}), ("-uncached", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})):
        run = [*words, f"run.name={name}{end}"]
        found = run_world(2, over_gloo, train_rank, run, environment=environment)
        assert [code for code, *_ in found] == [0, 0], found
    assert losses(recipe.parent / f"{name}-uncached") == pytest.approx(losses(recipe.parent / name), rel=TOLERANCE)
