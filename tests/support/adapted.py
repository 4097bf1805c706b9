"""Adapters as peft makes them, for the tests of LoRA and QLoRA."""

import json

import reference
import torch
from cases import DECAY, MAX_NORM, RATE, Case, rows_of_steps
from tiny import write_model


def ours(name: str) -> str:
    """Our name of a parameter of peft's."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    name = name.replace(".modules_to_save.default.", ".").replace(".default.weight", ".weight").replace(".default", "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


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


def train_adapted(base, adapter, recipe, tiny, case: Case) -> reference.Result:
    """What transformers + peft make of a case's data in one process, by our names: `base` with the `adapter`."""
    import peft

    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    words = tuple(word for word in case.extra if word.startswith("data."))
    steps = rows_of_steps(recipe, tiny, case.rows, words, case.steps)

    def loss_of(step):
        parts = [reference.document_loss(model, document) for row in steps[step] for document in row]
        return sum(part for part, _ in parts) / sum(count for _, count in parts)

    result = reference.descend(model, loss_of, len(steps), RATE, DECAY, MAX_NORM if case.clips else 0.0)
    result.gradients = [{ours(name): g for name, g in found.items()} for found in result.gradients]
    result.weights = {ours(name): w for name, w in result.weights.items() if "original_module" not in name}
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
