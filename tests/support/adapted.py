"""Adapters as peft makes them, for the tests of LoRA and QLoRA."""

import torch


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
