"""Pushing a run's result to the Hub: its export, a model card and the recipe, in one commit: nothing is half sent."""

from pathlib import Path

from shardbook.paths import whole_directory
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import RecipeError, Train, first_line
from shardbook.run.card import write_card
from shardbook.run.console import Console
from shardbook.run.directory import read_facts
from shardbook.run.files import check_repo


def push_if_asked(run: Path, train: Train, console: Console) -> None:
    """Pushes the result of `run`, where the recipe asks for it. Raises RunFailed where sending failed."""
    if train.push_to_hub:
        console.print(f"pushed   {push_run(run, train.hub_model_id)}")


def push_run(run: Path, repo: str, public: bool = False, export: Path | None = None) -> str:
    """Pushes a finished run's `export` (default: the run's own) to `repo`, private unless `public`. Returns the
    repository's address. Raises RecipeError where there is nothing to send or `repo` cannot be used, and RunFailed
    where sending failed: then nothing was committed."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    folder = stage_push(run, repo, export or run / "export")
    files = list(folder.iterdir())
    size = sum(path.stat().st_size for path in files) / 1e9
    waits = f"{len(files)} files of {size:.2f} GB lie in {folder}"
    try:
        check_repo(repo)
    except RecipeError as error:
        raise RecipeError(f"{error}; {waits}") from None
    hub = HfApi()
    try:
        if hub.repo_exists(repo):
            raise RecipeError(f"repository {repo}: is there already; name another, or delete it first; {waits}")
        hub.create_repo(repo, private=not public)
        try:
            commit = hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{run.name}, by Shardbook")
        except BaseException:
            hub.delete_repo(repo, missing_ok=True)  # nothing half sent
            raise
    except (HfHubHTTPError, OSError) as error:
        raise RunFailed(f"repository {repo}: not pushed: {first_line(error)}; {waits}") from None
    return str(commit.repo_url)


def stage_push(run: Path, repo: str, export: Path) -> Path:
    """Makes push/ of a run: links to the export's files, README.md, losses.svg and recipe.toml. Returns it."""
    if not read_facts(run).get("finished_steps"):
        raise RecipeError(f"{run}: has not finished; run its command again to its end, then push")
    if not export.is_dir() or not any(export.glob("*.safetensors")):
        raise RecipeError(f"{export}: holds no weights; write them with `shardbook export {run}`")
    card, plot = write_card(run, repo)
    folder = run / "push"
    with whole_directory(folder) as made:
        for path in sorted(path for path in export.iterdir() if path.is_file() and path.name != "README.md"):
            (made / path.name).symlink_to(path.resolve())
        (made / "README.md").write_text(card)
        (made / "losses.svg").write_text(plot)
        (made / "recipe.toml").write_text((run / "resolved.toml").read_text())
    return folder
