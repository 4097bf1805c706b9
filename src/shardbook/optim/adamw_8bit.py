"""AdamW with moments of eight bits: torchao's, which leaves a bad step out, to the bit, without a host sync."""

from typing import Any

import torch
from torch import Tensor
from torchao import optim as torchao

from shardbook.optim.elementwise import keep_where, local_values, parts_of


class AdamW8bit(torchao.AdamW8bit):
    """torchao's, a parameter at a time: what is copied, to be put back, is never more than one and its moments."""

    param_groups: list[dict[str, Any]]
    counts_on_host = True
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        for one, parameter in [(each, p) for each in groups for p in each["params"] if p.grad is not None]:
            self.param_groups = [{**one, "params": [parameter]}]
            before = [each.clone() for each in self._changed(parameter) if self.found_inf is not None]
            super().step()
            for number, new in enumerate(self._changed(parameter)):
                if self.found_inf is not None:
                    old = before[number] if number < len(before) else torch.zeros_like(new)  # moments begin so
                    keep_where(self.found_inf < 1, new, old)
        self.param_groups = groups

    def _changed(self, parameter: Tensor) -> list[Tensor]:
        kept = [parameter, *(value for name, value in self.state[parameter].items() if name != "step")]
        return [part for each in kept for part in parts_of(local_values(each))[:2]]  # the table of codes stays
