"""Pushing a run's result to the Hub: its export with a model card, in one commit: nothing is half sent.

Invariant: the card says what the run recorded; a loss that was not measured is absent.
"""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from shardbook.paths import is_hub_id, write_whole
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import Recipe, RecipeError, Train, first_line, load_recipe
from shardbook.run.directory import read_facts
from shardbook.run.log.console import Console
from shardbook.run.log.recorder import read_rows

PACKAGES = ("shardbook", "torch", "transformers", "datasets", "cuda", "gpu")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # on the Hub
LOSSES = {"train": "train/loss", "eval": "eval/loss"}


def check_push(train: Train) -> None:
    """Raises RecipeError where the result is to be pushed to the Hub, and could not be."""
    if train.push_to_hub:
        try:
            check_repo(train.hub_model_id)
        except RecipeError as error:
            raise RecipeError(f"train.push_to_hub: {error}") from None


def check_repo(repo: str) -> None:
    """Raises RecipeError where nothing can be pushed to `repo`: it is no name of a repository, or there is no token."""
    if not REPOSITORY.fullmatch(repo):
        raise RecipeError(f"repository {repo!r}: must look like name/model")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise RecipeError(f"repository {repo}: HF_HUB_OFFLINE is set; unset it to push")
    if not huggingface_hub.get_token():
        raise RecipeError(f"repository {repo}: no token; run `hf auth login`, or set HF_TOKEN")


def push_if_asked(run: Path, train: Train, console: Console) -> None:
    """Pushes the result of `run`, where the recipe asks for it. Raises RunFailed where sending failed."""
    if train.push_to_hub:
        console.print(f"pushed   {push_run(run, train.hub_model_id)}")


def push_run(run: Path, repo: str, public: bool = False, export: Path | None = None) -> str:
    """Pushes a finished run's `export` (default: the run's own) to `repo`, private unless `public`. A README.md that
    lies there is sent as it is, else a card is written. Returns the repository's address. Raises RecipeError where
    there is nothing to send or `repo` cannot be used, and RunFailed where sending failed: then nothing is there."""
    export = export or run / "export"
    if not read_facts(run).get("finished_steps"):
        raise RecipeError(f"{run}: has not finished; run its command again to its end, then push")
    if not any(export.glob("*.safetensors")):
        raise RecipeError(f"{export}: holds no weights; write them with `shardbook export {run}`")
    recipe, hub = load_recipe(run / "resolved.toml"), HfApi()
    try:
        check_repo(repo)
        if hub.repo_exists(repo):
            raise RecipeError(f"repository {repo}: is there already; name another, or delete it first")
        if not (export / "README.md").exists():
            write_whole(export / "README.md", str(build_card(run, recipe, read_license(hub, recipe.model.path))))
        hub.create_repo(repo, private=not public)
        try:
            message = f"{run.name}, by Shardbook"
            commit = hub.upload_folder(repo_id=repo, folder_path=export, commit_message=message, ignore_patterns="*/*")
        except BaseException:
            hub.delete_repo(repo, missing_ok=True)  # nothing half sent
            raise
    except RecipeError as error:
        raise RecipeError(f"{error}; the result lies in {export}") from None
    except (HfHubHTTPError, OSError) as error:
        why = first_line(error)
        raise RunFailed(f"repository {repo}: not pushed: {why}; the result lies in {export}") from None
    return str(commit.repo_url)


def read_license(hub: HfApi, base: str) -> str | None:
    """Returns the license that the card of the model `base` names, which holds for what is trained from it."""
    card = hub.model_info(base).card_data if is_hub_id(base) and hub.repo_exists(base) else None
    return card.license if card else None


def build_card(run: Path, recipe: Recipe, license: str | None) -> ModelCard:
    """Returns the model card of a finished run: what it was trained from, how, and to which losses."""
    facts, base, rank = read_facts(run), recipe.model.path, recipe.lora.r
    last: dict[str, Any] = {key: value for row in read_rows(run / "metrics.jsonl") for key, value in row.items()}
    sources = [recipe.data.train] if isinstance(recipe.data.train, str) else recipe.data.train
    datasets = [name for source in sources if is_hub_id(name := re.split(r"[:\[]", str(source))[0])]
    front = ModelCardData(
        base_model=base if is_hub_id(base) else None,
        library_name="peft" if rank else "transformers",
        license=license,
        datasets=datasets or None,
        tags=["shardbook", recipe.method],
    )
    ranks = facts.get("world_size", 1)
    lora = f", LoRA of rank {rank}" if rank else ""
    losses = "".join(f"- final {name} loss: {last[key]:.4f}\n" for name, key in LOSSES.items() if key in last)
    versions = ", ".join(f"{name} {facts[name]}" for name in PACKAGES if name in facts)
    return ModelCard(f"""---
{front.to_yaml()}
---

# {run.name}

{base} ({recipe.model.revision}) trained with Shardbook by `{recipe.method}`{lora}, on {", ".join(map(str, sources))}.

- stage: {recipe.parallel.stage} on {ranks} rank{"s" * (ranks > 1)}
- steps: {facts["finished_steps"]:,}
{losses}- versions: {versions}

To repeat it: `shardbook train recipe.toml --nproc {ranks}`, where recipe.toml is

```toml
{(run / "resolved.toml").read_text().strip()}
```
""")
