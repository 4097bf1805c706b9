"""Adapters as peft makes them, for the tests of LoRA and QLoRA."""

import json
import re

import reference
import torch
from cases import DECAY, MAX_NORM, RATE, Case, rows_of_steps
from tiny import write_model


def ours(name: str) -> str:
    """Our name of a parameter of peft's."""
    name = re.sub(r"(\.base_layer)+\.", ".", name.removeprefix("base_model.model."))
    name = name.replace(".modules_to_save.default.", ".").replace(".default.weight", ".weight").replace(".default", "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def with_stacks(tensors: dict, stacks: list[str], experts: int) -> dict:
    """Tensors by our names from those by peft's, whose wrappers of experts adapt the parameters `stacks`, the first
    innermost. There B is [out, r * experts], the number of the expert the faster one; ours is [experts * out, r]."""
    made = {}
    for name, tensor in tensors.items():
        before, word, after = name.partition(".experts.")
        if word and ".lora_" in f".{after}":
            stack = stacks[len(stacks) - 1 - after.count("base_layer.")]
            letter = "A" if "lora_A" in after else "B"
            if letter == "B":
                tensor = torch.cat([tensor[:, expert::experts] for expert in range(experts)])
            made[ours(f"{before}.experts.{stack}_lora_{letter}")] = tensor
        else:
            made[ours(name)] = tensor
    return made


def write_adapters(folder, kinds: dict, plain_model) -> None:
    """One of each of `kinds` (peft's settings first) on `plain_model(kind)`: A and B, and magnitudes, at random."""
    import peft

    for kind, (settings, *_) in kinds.items():
        torch.manual_seed(7)
        model = peft.get_peft_model(plain_model(kind), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05)
                elif "magnitude" in name:
                    parameter.mul_(1.1)
        model.save_pretrained(folder / kind)


def words_of(settings: dict, adapter) -> tuple[str, ...]:
    """Overrides of a recipe that goes on from an `adapter` of these `settings` of peft's."""
    said = {key: value if value == "all-linear" else json.dumps(value) for key, value in settings.items()}
    return (*(f"lora.{key}={value}" for key, value in said.items()), f"lora.adapter={adapter}")


def train_adapted(
    base, adapter, recipe, tiny, case: Case, by_our_names=lambda tensors: {ours(n): t for n, t in tensors.items()}
) -> reference.Result:
    """What transformers + peft make of a case's data in one process, by our names: `base` with the `adapter`."""
    import peft

    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    words = tuple(word for word in case.extra if word.startswith("data."))
    steps = rows_of_steps(recipe, tiny, case.rows, words, case.steps)

    def loss_of(step):
        parts = [reference.document_loss(model, document) for row in steps[step] for document in row]
        return sum(part for part, _ in parts) / sum(count for _, count in parts)

    result = reference.descend(model, loss_of, len(steps), RATE, DECAY, MAX_NORM if case.clips else 0.0)
    result.gradients = [by_our_names(found) for found in result.gradients]
    result.weights = by_our_names({n: w for n, w in result.weights.items() if "original_module" not in n})
    result.rows = steps[0]
    return result


def write_rounded(folder, name, **facts):
    """Writes a model to `folder`/`name` and, with the matrices of its blocks in NF4, to `folder`/rounded/`name`."""
    write_model(folder / name, **facts)
    model = reference.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    with torch.no_grad():
        for word, parameter in model.named_parameters():
            if ".layers." in word and parameter.ndim == 2:
                parameter.copy_(reference.nf4(parameter))
    model.save_pretrained(folder / "rounded" / name)
