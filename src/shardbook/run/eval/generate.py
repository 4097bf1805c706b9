"""Samples while training: the sharded model continues prompts, into samples.jsonl, a wandb table and the console.

Invariant: a run that generates takes the same steps, to the bit, as one that does not. A token is drawn by (train.seed,
step, number of the sample) and its position alone, from no generator of training. Every rank runs as many forwards as
the others, since each may all-gather.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

from shardbook.arithmetic import ceil_div
from shardbook.data.loader import ROUND_TO, Batching, build_micro_batch
from shardbook.model.attention import cached_attention
from shardbook.parallel.context import whole_rows
from shardbook.parallel.sharding import ShardedModel
from shardbook.parallel.step import run_forward
from shardbook.parallel.tensor import whole_tokens
from shardbook.ranks.distributed import Ranks, sum_over_ranks
from shardbook.ranks.progress import mark_each
from shardbook.run.log.console import Console
from shardbook.run.log.recorder import Recorder
from shardbook.run.prepare import Job

SHOWN = 2  # samples on the console; samples.jsonl has all


@dataclass(frozen=True)
class Generation:
    """Takes samples, every `generate.steps` steps and after the last."""

    job: Job
    sharded: ShardedModel
    ranks: Ranks
    recorder: Recorder
    console: Console

    def take(self, step: int, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """Continues the prompts inside `pause`, if due; logs all samples and shows the first ones. Collective."""
        every = self.job.recipe.generate.steps
        if not self.job.prompts.ids or (step % every and step != self.job.steps):
            return
        with pause():
            completions = self._continue(step)
            text_of, stops = self.job.tokenizer.decode, self.job.prompts.stops
            samples = [
                {
                    "step": step,
                    "prompt": text_of(ids),
                    "completion": text_of(without(completion, stops)),
                    "tokens": len(completion),
                }
                for ids, completion in zip(self.job.prompts.ids, completions, strict=True)
            ]
            self.recorder.log_samples(samples)
            texts = self.job.prompts.texts or [sample["prompt"] for sample in samples]
            for text, sample in zip(texts[:SHOWN], samples, strict=False):
                self.console.show_sample(step, str(text), str(sample["completion"]))

    def _continue(self, step: int) -> list[list[int]]:
        """Returns the tokens after each prompt. A dp rank continues every n-th; with fewer, the first ones again."""
        place, places, *_ = self.sharded.layout.data_rank(self.ranks.rank)
        asked, count = self.job.recipe.generate, len(self.job.prompts.ids)
        seed, most = self.job.recipe.train.seed, asked.max_new_tokens
        numbers = [(place + turn * places) % count for turn in range(ceil_div(count, places))]
        draws = torch.stack([draw(seed, step, number, most) for number in numbers])

        def choose(logits: Tensor, turn: int) -> Tensor:
            return pick(logits.float(), asked.temperature, draws[:, turn])

        width = max(map(len, self.job.prompts.ids))  # of all prompts: the same shapes on each rank
        prompts = [self.job.prompts.ids[number] for number in numbers]
        tokens = decode(self.sharded, prompts, width, self.job.prompts.stops, most, choose, self.ranks.device)
        everyone: list[dict[int, list[int]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, dict(zip(numbers, tokens, strict=True)))
        merged = {number: tokens for theirs in reversed(everyone) for number, tokens in theirs.items()}
        return [merged[number] for number in range(count)]


@torch.no_grad()
def decode(
    sharded: ShardedModel,
    prompts: list[list[int]],
    width: int,
    stops: list[int],
    most: int,
    choose: Callable[[Tensor, int], Tensor],
    device: torch.device,
) -> list[list[int]]:
    """Returns at most `most` tokens after each of `prompts`, up to the first of `stops`, included. `choose`: from
    logits [B, vocabulary] and a position the tokens [B], on the host. Collective: ends when all ranks' rows have."""
    model: Any = sharded.model.eval()
    continuation = (Recomputed if sharded.links else Cached)(sharded, prompts, width, device)
    tokens_drawn, ends = list[Tensor](), torch.tensor(stops)
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    with ExitStack() as inside:
        # eager: compiled blocks would be compiled again for every length
        tokens = nullcontext() if sharded.links else whole_tokens(model)
        rows = whole_rows(model), cached_attention(model.config), torch.compiler.set_stance("force_eager")
        for context in (sharded.gathered_once(), tokens, *rows):
            inside.enter_context(context)
        for turn in mark_each(range(most), "token of samples"):
            tokens_drawn.append(continuation.next_tokens(lambda logits, turn=turn: choose(logits, turn)))
            is_done |= torch.isin(tokens_drawn[-1], ends)
            if not sum_over_ranks(not is_done.all())[0]:
                break
    model.train()
    return [cut(row, stops) for row in torch.stack(tokens_drawn, 1).tolist()]


class Cached:
    """Prompts and their continuations, token by token, with a cache of keys and values."""

    def __init__(self, sharded: ShardedModel, prompts: list[list[int]], width: int, device: torch.device):
        model: Any = sharded.model
        self.model, self.device = model, device
        ids, attended = torch.zeros(2, len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):  # padded on the left, so that every prompt ends in the last column
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attended[row, width - len(prompt) :] = 1
        self.ids, self.attended = ids.to(device), attended.to(device)
        self.cache = DynamicCache(config=model.config)

    def next_tokens(self, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the token after each row, [B] on the host, by `choose` of logits [B, vocabulary]. Collective."""
        places = (self.attended.cumsum(-1) - 1).clamp(min=0)[:, -self.ids.shape[1] :]
        tokens = choose(self.model(self.ids, places, self.attended, cache=self.cache))
        self.ids = tokens[:, None].to(self.device)
        self.attended = torch.nn.functional.pad(self.attended, (0, 1), value=1)
        return tokens


class Recomputed:
    """Prompts and their continuations where layers lie on several ranks: for each token all rows pass through all of
    them, as in an evaluation. That is slow, and needs no cache on any rank."""

    def __init__(self, sharded: ShardedModel, prompts: list[list[int]], width: int, device: torch.device):
        self.sharded, self.rows, self.device = sharded, [list(prompt) for prompt in prompts], device
        multiple = math.lcm(ROUND_TO[device.type], sharded.layout.token_parts)
        self.batching = Batching(None, len(prompts), 0, 1, multiple=multiple)

    def next_tokens(self, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the token after each row, [B] on the host, by `choose` of logits [B, vocabulary]. Collective."""
        documents: Any = [{"input_ids": row, "mask": [True] * len(row)} for row in self.rows]
        micro = build_micro_batch(documents, [(number,) for number in range(len(self.rows))], self.batching)
        assert micro.ends is not None, "rows hold no sequences"
        micro = replace(micro, positions=micro.ends, targets=None)
        logits = run_forward(self.sharded, micro, lambda model, batch: model(batch), self.device)
        links: Any = self.sharded.links
        tokens = choose(logits) if logits.ndim else torch.zeros(len(self.rows), dtype=torch.int64)
        tokens = links.from_last_stage(tokens.to(self.device)).cpu()
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        return tokens


def pick(logits: Tensor, temperature: float, draws: Tensor) -> Tensor:
    """Returns the likeliest tokens [B] of logits [B, vocabulary] or, with a `temperature`, the tokens at quantiles
    `draws` [B], from 0 to 1, of their distribution. The result is on the host: the one device sync of a token."""
    if not temperature:
        return logits.argmax(-1).cpu()
    # on the host: train.deterministic refuses CUDA's cumulative sum along fp64 rows
    shares = (logits.cpu().double() / temperature).softmax(-1).cumsum(-1)
    return torch.searchsorted(shares, draws[:, None] * shares[:, -1:], right=True)[:, 0]


def draw(seed: int, step: int, number: int, count: int) -> Tensor:
    """Returns `count` numbers from 0 to 1 for one sample, the same on every device and any number of ranks."""
    digest = hashlib.sha256(f"{seed} {step} {number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return torch.rand(count, dtype=torch.float64, generator=generator)


def cut(tokens: list[int], stops: Iterable[int]) -> list[int]:
    """Returns `tokens` up to the first of `stops`, included."""
    return tokens[: next((at + 1 for at, token in enumerate(tokens) if token in stops), len(tokens))]


def without(tokens: list[int], stops: Iterable[int]) -> list[int]:
    """Returns `tokens` without a stop at their end."""
    return tokens[:-1] if tokens[-1] in stops else tokens
