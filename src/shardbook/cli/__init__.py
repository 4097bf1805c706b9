"""The console command `shardbook`: its arguments, and the modules that its commands call. A run is train.py's story.
Commands that only read and write files are in cli/results.py."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import shardbook
from shardbook.cli.results import run_export, run_init, run_push, show_recipes
from shardbook.comm.versions import check_versions
from shardbook.plan.hardware import build_cluster
from shardbook.recipe import RecipeError, describe_keys, find_recipe, load_recipe, parse_recipe

# The recipe that `plan --model` plans, with the settings that the shipped recipes have on GPUs.
PLAIN = """
[data]
max_length = 8192
skip_untrainable = true
[activation]
checkpointing = "selective"
[train]
epochs = 1
per_device_train_batch_size = 1
compile = true
"""


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of a command line, and that of each command."""
    description = "Fine-tune large language models with named, tested stages on FSDP2."
    parser = argparse.ArgumentParser(prog="shardbook", description=description)
    parser.add_argument("--version", action="version", version=f"shardbook {shardbook.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help: str, **more: Any) -> Callable[..., argparse.Action]:
        return commands.add_parser(name, help=help, **more).add_argument

    keys = "".join(f"\n  {name} = {default}\n      {help}" for name, default, help in describe_keys())
    raw = argparse.RawDescriptionHelpFormatter
    add = command("train", "run a recipe on this machine", formatter_class=raw, epilog=f"keys of a recipe:{keys}")
    add("recipe", help="a name (see `shardbook recipes`) or a .toml file")
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="keys to change, e.g. optim.learning_rate=1e-5",
    )
    add("--nproc", type=int, help="ranks to start (default: what a fixed mesh needs, else all GPUs, else 2)")
    add("--nodes", type=int, default=1, help="machines that start this command, each once (default: 1)")
    add("--node-rank", type=int, default=0, help="which of them this is, from 0 (default: 0)")
    add("--head", default="", help="the first machine, host or host:port (default port: 29500)")
    add("--max-restarts", type=int, default=0, help="how often to start ranks again after a failure (default: 0)")
    add("--dry-run", action="store_true", help="check the recipe at --nproc x --nodes ranks, and allocate nothing")
    add = command("compare", "the same recipe under several stages, and a page that compares them")
    add("recipe", help="a recipe; or the directory of a comparison, to make only its report again")
    add("overrides", nargs="*", default=[], metavar="section.key=value", help="keys to change in every variant")
    example = '"zero2 zero3,activation.checkpointing=full"'
    add("--stages", default="", help=f"variants apart by spaces, each a stage and overrides: {example}")
    add("--nproc", type=int, help="ranks of every variant (default: as for train)")
    add("--beside", default="", metavar="VARIANT", help="variant to compare the others with (default: the first)")
    add("--publish", action="store_true", help="send runs, view and report to wandb (needs a key)")
    add = command("report", "a page of one run: losses, speed, memory, traffic, samples")
    add("run", type=Path, help="a run directory")
    add("--html", type=Path, help="page to write (default: report.html of the run)")
    add = command("eval", "loss, perplexity, and of pairs accuracy and margin, of a run, an export or any model")
    add("model", help="a run directory, an export, a model's directory or a hub id")
    rows = "keys to change; data=FILE: the rows (else a run's own)"
    add("overrides", nargs="*", default=[], metavar="section.key=value", help=rows)
    add("--nproc", type=int, help="ranks to start (default: as for train)")
    add("--json", action="store_true", help="one JSON object on standard output, and nothing else there")
    add = command("plan", "what a recipe takes on a cluster, stage by stage; needs no GPU")
    add("recipe", nargs="?", default="", help="a name (see `shardbook recipes`) or a .toml file; may be left out")
    add("overrides", nargs="*", default=[], metavar="section.key=value", help="keys to change")
    add("--model", default="", help="a model by name (llama-3.1-8b), hub id or directory, in place of the recipe's")
    add("--gpus", type=int, default=8, help="GPUs of the cluster (default: 8)")
    add("--gpu", default="h100-80gb", help="their kind (default: h100-80gb)")
    add("--per-node", type=int, default=0, help="GPUs of a node (default: as that kind usually comes)")
    add("--network", type=float, default=0, help="Gbit/s of a node to the others (default: as usual)")
    add("--host-gb", type=float, default=0, help="GB of a node's memory, for offload (default: as usual)")
    add("--disk-gbps", type=float, default=0, help="GB/s that a node's drives read, for offload (default: as usual)")
    add("--link-gbps", type=float, default=0, help="GB/s from a GPU to others of its node (default: as usual)")
    add("--document-tokens", type=float, default=1200, help="tokens of a document, for attention (default: 1,200)")
    load = "rows of the rank along ep whose experts get most, as a multiple of the mean (default: 1)"
    add("--expert-load", type=float, default=1.0, help=load)
    add("--calibrate", type=Path, nargs="+", metavar="RUN", help="run directories, to fit the time's constants to")
    add("--simulate", action="store_true", help="also run a step of the recipe's stage on fake tensors (half a minute)")
    add("--json", action="store_true", help="one JSON object on standard output, and nothing else there")
    add("--html", type=Path, help="page to write, with charts")
    add("--write", type=Path, help="file for the advised recipe")
    add = command("data", "a recipe's data as it will be trained, token by token; needs a tokenizer")
    add("recipe", help="a name (see `shardbook recipes`) or a .toml file")
    add("overrides", nargs="*", default=[], metavar="section.key=value", help="keys to change")
    add("--rows", type=int, default=3, help="rows of each source to show (default: 3)")
    add("--html", type=Path, help="page to write")
    add = command("export", "write a checkpoint of a run as Hugging Face safetensors")
    add("run", type=Path, help="a run directory")
    add("--checkpoint", type=Path, help="a checkpoint directory (default: the run's newest)")
    add("--out", type=Path, help="directory to write (default: export/ of the run)")
    add("--dtype", choices=("fp32", "bf16"), help="dtype of the weights (default: the recipe's train.export_dtype)")
    add("--merge", action="store_true", help="for a run with LoRA: the whole model, with adapters added to its weights")
    add = command("verify", "read all checkpoints of a run, and say which are whole")
    add("run", type=Path, help="a run directory")
    add = command("push", "send a finished run's result and a model card to the Hugging Face Hub")
    add("run", type=Path, help="a run directory")
    add("--repo", required=True, help="the repository to make, name/model")
    add("--public", action="store_true", help="let everyone see it (default: private)")
    add("--export", type=Path, help="directory of the weights (default: export/ of the run)")
    add = command("init", "copy a recipe, with its comments, to start one of your own from")
    add("file", type=Path, help="the .toml file to write")
    add("--of", default="smollm2-135m-fsdp", help="the recipe to copy (default: smollm2-135m-fsdp)")
    command("recipes", "list the recipes")
    add = command("translate", "a recipe from a file of DeepSpeed, accelerate, TRL, axolotl or LLaMA-Factory")
    add("file", type=Path, help="their JSON or YAML, or a shell script with one command (.sh)")
    add("--out", type=Path, help="recipe to write (default: standard output)")
    add("--without-refused", action="store_true", help="leave out keys without a counterpart")
    add = command("completion", "print the completion of a shell: recipes, keys, values")
    add("shell", choices=("bash", "zsh", "fish"), help='for bash, in ~/.bashrc: eval "$(shardbook completion bash)"')
    return parser, commands.choices


def main(words: list[str] | None = None) -> int:
    """Runs one command line. Returns the exit code: 0 done, 1 failed, 2 wrong recipe or command line, 75 preempted."""
    parser, commands = build_parser()
    asked, rest = parser.parse_known_args(words)
    if rest and not ("overrides" in vars(asked) and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    keys = [*vars(asked).get("overrides", ()), *rest]
    try:
        check_versions()
        if (nproc := vars(asked).get("nproc")) is not None and nproc < 1:
            raise RecipeError(f"--nproc {nproc}: must be at least 1")
        match asked.command:
            case "train":
                nodes = (asked.nodes, asked.node_rank, asked.head)
                return run_train(asked.recipe, keys, asked.nproc, nodes, asked.dry_run, asked.max_restarts)
            case "compare":
                return run_compare(asked.recipe, keys, asked.stages, asked.nproc, asked.beside, asked.publish)
            case "report":
                return run_report(asked.run, asked.html)
            case "eval":
                from shardbook.run.eval.model import launch_evaluation

                return launch_evaluation(asked.model, keys, asked.nproc, asked.json)
            case "plan":
                return run_plan(asked, keys)
            case "data":
                return run_data(asked.recipe, keys, asked.rows, asked.html)
            case "export":
                return run_export(asked.run, asked.checkpoint, asked.out, asked.dtype, asked.merge)
            case "verify":
                from shardbook.run.checkpoint.format import verify_run

                return verify_run(asked.run)
            case "push":
                return run_push(asked.run, asked.repo, asked.public, asked.export)
            case "init":
                return run_init(asked.file, asked.of)
            case "translate":
                from shardbook.translate import translate_file

                translate_file(asked.file, asked.out, asked.without_refused)
                return 0
            case "completion":
                from shardbook.cli.completion import print_completion

                return print_completion(asked.shell, commands)
            case _:
                return show_recipes()
    except RecipeError as error:
        print(f"shardbook: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shardbook: interrupted", file=sys.stderr)
        return 1
    except OSError as error:  # a full or read-only disk, a name that is too long
        print(f"shardbook: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 1


def run_train(
    name: str, overrides: list[str], nproc: int | None, node: tuple[int, int, str], is_dry: bool, restarts: int
) -> int:
    if restarts < 0:
        raise RecipeError(f"--max-restarts {restarts}: must be at least 0")
    if restarts and node[0] > 1:
        reason = "machines do not agree on when to start again; leave it out, or start with torchrun --max-restarts"
        raise RecipeError(f"--max-restarts {restarts} with --nodes {node[0]}: {reason}")
    path = find_recipe(name)
    recipe = load_recipe(path, overrides)  # refused here before a process is started
    from shardbook.ranks.launch import Nodes, Restarts, launch_ranks
    from shardbook.ranks.machine import check_state, choose_nproc

    if is_dry:
        from shardbook.run.rehearsal import rehearse

        Nodes(node[0], 0, "head")  # a dry run needs only their number
        nproc = nproc or choose_nproc(recipe.parallel, None, node[0])
        rehearse(recipe, nproc * node[0], nproc)
        return 0
    nodes = Nodes(*node)
    check_state(recipe.hardware.memory_gb, path.stem, nodes.count)
    nproc, words = choose_nproc(recipe.parallel, nproc, nodes.count), [str(path), *overrides]
    if not restarts:
        return launch_ranks(nproc, words, nodes)
    from shardbook.run.directory import name_run, newest_step

    run_name = name_run(recipe.run, path)  # fixed here: a name with the time would be another one after a restart
    left = Restarts(restarts, lambda: newest_step(recipe.run, run_name))
    return launch_ranks(nproc, [*words, f"run.name={run_name}"], nodes, left)


def run_compare(name: str, overrides: list[str], stages: str, nproc: int | None, beside: str, publishes: bool) -> int:
    """Runs the variants and writes their report; where `name` is the directory of a comparison, writes the report."""
    if Path(name).is_dir():
        if stages or overrides or nproc:
            hint = "only its report is made anew; leave out --stages, --nproc and keys"
            raise RecipeError(f"{name} is a directory: {hint}")
        if (Path(name) / "resolved.toml").is_file():
            hint = "name a recipe with --stages, or the directory that a comparison made; its own page"
            raise RecipeError(f"{name} is one run, and a comparison has several: {hint}: shardbook report {name}")
        from shardbook.compare import report

        report(Path(name), beside, publishes)
        return 0
    path = find_recipe(name)
    recipe = load_recipe(path, overrides)
    from shardbook.compare import compare
    from shardbook.ranks.machine import check_state, choose_nproc

    check_state(recipe.hardware.memory_gb, path.stem, nodes=1)
    return compare(path, stages, overrides, choose_nproc(recipe.parallel, nproc), recipe.run, beside, publishes)


def run_report(run: Path, html: Path | None) -> int:
    """Writes the page of one run, also of one that goes on."""
    if not (run / "resolved.toml").is_file():
        is_many = any(run.glob("*/resolved.toml"))
        kind = f"a comparison; its page: shardbook compare {run}" if is_many else "not a run (no resolved.toml in it)"
        raise RecipeError(f"{run}: {kind}")
    check_new("--html", html)
    from shardbook.compare.run_page import write_run_page

    print(f"report   {write_run_page(html or run / 'report.html', run.resolve())}")
    return 0


def run_plan(asked: argparse.Namespace, words: list[str]) -> int:
    """Prints the memory and time of each stage, and advice. Allocates nothing and fetches nothing."""
    # beside --model the first argument may be an override, as there is no recipe
    if "=" in asked.recipe and not Path(asked.recipe).is_file():
        words, asked.recipe = [asked.recipe, *words], ""
    if not (asked.recipe or asked.model):
        raise RecipeError("plan: needs a recipe, or --model with a model's name, hub id or directory")
    for name in ("network", "per_node", "host_gb", "disk_gbps", "link_gbps"):
        if (number := getattr(asked, name)) < 0:
            option = f"--{name.replace('_', '-')}"
            raise RecipeError(f"{option} {number:g}: must be above 0, or 0 for the usual value")
    check_new("--write", asked.write)
    check_new("--html", asked.html)
    shipped = partial(parse_recipe, PLAIN, "--model")
    read_recipe = partial(load_recipe, find_recipe(asked.recipe)) if asked.recipe else shipped
    read_recipe(words)  # what needs no model is refused before torch is imported
    node = asked.network, asked.per_node, asked.host_gb, asked.disk_gbps, asked.link_gbps
    cluster = build_cluster(asked.gpu, asked.gpus, *node)
    from shardbook.model.shapes import hub_id
    from shardbook.objectives import build_objective
    from shardbook.plan.recipe_file import write_recipe_file
    from shardbook.plan.report import make_report, show_report
    from shardbook.run.calibration_runs import calibrate, read_sample

    recipe = read_recipe([*words, *([f"model.path={hub_id(asked.model)}"] if asked.model else [])])
    kind = recipe.method, recipe.preference, recipe.distill, recipe.train.router_aux_loss_coef
    terms = build_objective(*kind).terms if asked.simulate else None
    read = (recipe.model.path, asked.gpu, asked.document_tokens)
    cluster = calibrate(cluster, [read_sample(run, *read) for run in asked.calibrate or ()])
    report = make_report(recipe, asked.gpu, cluster, asked.document_tokens, terms, asked.expert_load)
    show_report(report, asked.json)
    if not (asked.recipe or asked.json):
        keys = "data.max_length=4096, train.per_device_train_batch_size=2, ... change them"
        print(f"assumed  no recipe: rows and settings above are those of the shipped recipes; {keys}")
    if asked.html:
        from shardbook.compare.plan_page import write_plan_page

        write_plan_page(asked.html, report)
    if asked.write:
        write_recipe_file(report, asked.write)
    return 0


def check_new(option: str, file: Path | None) -> None:
    if file and (file.exists() or not file.parent.is_dir()):
        what = "exists; name a new file" if file.exists() else "there is no such directory"
        raise RecipeError(f"{option} {file}: {what}")
    if file:
        try:
            file.touch()
            file.unlink()  # until there is something to write
        except OSError as error:
            raise RecipeError(f"{option} {file}: cannot be written ({error.strerror})") from None


def run_data(name: str, overrides: list[str], rows: int, html: Path | None) -> int:
    """Prints the data as it will be trained, and writes a page of it. Reads no weights and starts no rank."""
    if rows < 0:
        raise RecipeError(f"--rows {rows}: must be at least 0")
    check_new("--html", html)
    recipe = load_recipe(find_recipe(name), overrides)
    from shardbook.data.find import find_sources

    find_sources(recipe.data.train, "data.train")  # before transformers is imported
    from shardbook.data.encoding import load_tokenizer
    from shardbook.data.preview import show_preview, take_preview
    from shardbook.model.families import load_config
    from shardbook.model.hub import config_folder, tokenizer_folder
    from shardbook.parallel.placement import check_recipe

    check_recipe(recipe, load_config(recipe.model, config_folder(recipe.model), recipe.data.max_length))
    folder = tokenizer_folder(recipe.model)
    tokenizer = load_tokenizer(folder, "model.tokenizer", recipe.data.chat_template)
    preview = take_preview(recipe.data, recipe.train, tokenizer, folder, rows, sequences=recipe.sequences)
    show_preview(preview)
    if html:
        from shardbook.compare.data_page import write_data_page

        write_data_page(html, name, preview)
    return 0
