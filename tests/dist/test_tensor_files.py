"""Files know nothing of the axes inside a model, or of a pipeline: what was saved, exported or drawn with them is what
one process reads and writes."""

import shutil
from pathlib import Path

import pytest
import reference
import torch
from cases import DECAY, RATE, TOLERANCE, documents_of_steps, relative_error
from safetensors.torch import load_file
from tensor_cases import write_models
from world import losses, metrics, run_train, run_world, train_rank

SAVING = ("train.steps=5", "train.save_steps=2", "optim.eps=1e-3", "train.eval_steps=2")
# six rows a step in each: world, words
LAYOUTS = {
    "tp2 x dp2": (4, ["parallel.tp_size=2", "train.gradient_accumulation_steps=3"]),
    "one": (1, ["train.gradient_accumulation_steps=6"]),
    "dp3": (3, ["train.gradient_accumulation_steps=2"]),
    "tp4": (4, ["parallel.tp_size=4", "parallel.stage=zero1", "train.gradient_accumulation_steps=6"]),
    "hsdp, tp2": (
        4,
        [
            "parallel.tp_size=2",
            "parallel.stage=hsdp",
            "parallel.dp_shard_size=1",
            "train.gradient_accumulation_steps=3",
        ],
    ),
}
LAYOUTS |= {
    "cp2 x dp2": (4, ["parallel.cp_size=2", "train.gradient_accumulation_steps=3"]),
    "cp2 x tp2": (4, ["parallel.cp_size=2", "parallel.tp_size=2", "train.gradient_accumulation_steps=6"]),
    "ddp, cp2": (2, ["parallel.cp_size=2", "parallel.stage=ddp", "train.gradient_accumulation_steps=6"]),
}
LAYOUTS |= {
    "pp2 x dp2": (4, ["parallel.pp_size=2", "train.gradient_accumulation_steps=3"]),
    "pp2 x tp2": (4, ["parallel.pp_size=2", "parallel.tp_size=2", "train.gradient_accumulation_steps=6"]),
    "ddp, pp2": (2, ["parallel.pp_size=2", "parallel.stage=ddp", "train.gradient_accumulation_steps=6"]),
    "pp3, gpipe": (
        3,
        ["parallel.pp_size=3", "parallel.pipeline_schedule=gpipe", "train.gradient_accumulation_steps=6"],
    ),
}
LOOPED = ["parallel.pp_size=2", "parallel.pipeline_schedule=interleaved", "parallel.pipeline_chunks=2"]
FIRST = "tp2 x dp2"


@pytest.fixture(scope="module")
def straight(recipe):
    """Five steps without a stop, on tp 2 x dp 2 with zero3; checkpoints at 2, 4 and 5."""
    world, words = LAYOUTS[FIRST]
    return run_train(world, recipe, "straight", *SAVING, *words)


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All of model and optimizer in a checkpoint, whole, without ranks."""
    from shardbook.run.checkpoint.format import read_stored
    from shardbook.run.checkpoint.load import ItemReader, checkpoint_shapes, read_parameters

    weights = dict(read_parameters(checkpoint, checkpoint_shapes(checkpoint)))
    items = read_stored(checkpoint).items
    moments = {
        item.name: torch.empty(item.shape, dtype=getattr(torch, item.dtype))
        for rows in items.values()
        for item in rows
        if item.name.startswith("optimizer.")
    }
    ItemReader(checkpoint, items).read(moments)
    assert len(moments) == 3 * len(weights), "two moments and a count of each parameter"
    return weights | moments


def lay_out(words: list[str], recipe: Path) -> tuple:
    """On each rank: a recipe's model under its stage, with its optimizer; nothing is loaded."""
    from shardbook.model.families import load_config
    from shardbook.parallel.mesh import build_mesh
    from shardbook.parallel.placement import World, build_local, layout_of
    from shardbook.parallel.sharding import apply_stage
    from shardbook.recipe import load_recipe, resolve_precision
    from shardbook.run.build import allocate_state

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    settings = resolve_precision(load_recipe(recipe, words), "cpu")
    config = load_config(settings.model, Path(settings.model.path), settings.data.max_length)
    local = build_local(settings, config, rank=rank, world_size=world_size)
    layout = layout_of(settings, local, World(world_size, world_size))
    sharded = apply_stage(local.model, layout, build_mesh(layout.sizes, "cpu"))
    return sharded, allocate_state(local.model, sharded, settings.optim, torch.device("cpu"))


def move(words: list[str], recipe: Path, source: Path, out: Path) -> None:
    """On each rank: load a checkpoint and save what was loaded, to `out`."""
    from shardbook.ranks.distributed import start_distributed
    from shardbook.run.checkpoint.load import load_checkpoint
    from shardbook.run.checkpoint.save import save_checkpoint

    start_distributed()
    sharded, optimizer = lay_out(words, recipe)
    state, _ = load_checkpoint(source, sharded, optimizer)
    save_checkpoint(out, sharded, optimizer, state, 0)


# from each of three to each of three
PAIRS = (
    *("cp2 x dp2", "one", "cp2 x dp2", "dp3", "cp2 x dp2", "pp2 x tp2", "pp2 x tp2", "dp3", "pp2 x dp2", "one"),
    *("pp2 x dp2", "dp3", "pp2 x dp2", "pp2 x tp2", "one"),
)
WAYS = [
    ["pp2 x tp2", "one"],
    pytest.param(
        ["cp2 x tp2", "dp3", "hsdp, tp2", "cp2 x dp2", "tp4", "ddp, pp2", "ddp, cp2", "pp3, gpipe", FIRST],
        marks=pytest.mark.slow,
    ),
    pytest.param(PAIRS, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("way", WAYS, ids=["few", "all", "pairs"])
def test_a_checkpoint_is_the_same_to_the_bit_from_layout_to_layout(way, recipe, straight, tmp_path):
    """Each saves what it loaded of the one before."""
    newest = straight / "checkpoints" / "step-000004"
    wanted = saved_tensors(newest)
    for number, name in enumerate(way):
        world, words = LAYOUTS[name]
        run_world(world, move, words, recipe, newest, tmp_path / str(number))
        newest = tmp_path / str(number) / "step-000004"
        found = saved_tensors(newest)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


@pytest.fixture(scope="module")
def plain(recipe, tiny):
    return reference.train(tiny / "model", documents_of_steps(recipe, tiny, 6, steps=5), RATE, DECAY)


def cut_back(straight: Path, name: str) -> Path:
    """A copy of the straight run as it was after step 2."""
    run = straight.parent / name
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("export", "run.json", "step-000004", "step-000005"))
    return run


def export_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


QUICK = (FIRST, "pp2 x dp2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in LAYOUTS])
def test_a_run_goes_on_as_the_plain_process_would(name, recipe, straight, plain):
    run = cut_back(straight, f"to {name}".replace(",", "").replace(" ", "-"))
    world, words = LAYOUTS[name]
    run_train(world, recipe, run.name, *SAVING, *words)
    assert losses(run) == pytest.approx(plain.losses, rel=TOLERANCE)
    norms = [row["train/grad_norm"] for row in metrics(run) if "train/grad_norm" in row]
    assert norms == pytest.approx(plain.norms, rel=TOLERANCE)
    for tensor, want in plain.weights.items():
        assert relative_error(export_of(run)[tensor], want) < TOLERANCE, tensor
    if name == FIRST:
        assert losses(run) == losses(straight)
        assert all(torch.equal(export_of(run)[tensor], want) for tensor, want in export_of(straight).items())


@pytest.mark.slow
def test_what_went_elsewhere_comes_back(recipe, straight, plain):
    """Two steps on tp 2 x dp 2, two on tp 4, the last on tp 2 x dp 2 again."""
    run = cut_back(straight, "there-and-back")
    world, words = LAYOUTS["tp4"]
    run_train(world, recipe, run.name, *SAVING, *words)
    for later in ("checkpoints/step-000005", "export"):
        shutil.rmtree(run / later)
    (run / "run.json").unlink()
    world, words = LAYOUTS[FIRST]
    run_train(world, recipe, run.name, *SAVING, *words)
    assert losses(run) == pytest.approx(plain.losses, rel=TOLERANCE)
    for tensor, want in plain.weights.items():
        assert relative_error(export_of(run)[tensor], want) < TOLERANCE, tensor


@pytest.mark.parametrize(
    ("name", "world", "words"),
    [
        pytest.param("looped", 2, [*LOOPED, "train.gradient_accumulation_steps=6"], marks=pytest.mark.slow),
        *(
            pytest.param(name, *LAYOUTS[name], marks=pytest.mark.slow)
            for name in ("pp2 x dp2", "pp2 x tp2", "ddp, pp2")
        ),
    ],
)
def test_a_pipeline_goes_on_bitwise(name, world, words, recipe, models):
    """On the layout on which it stopped; and on one rank as it would have gone on."""
    of, name = [*SAVING, f"model.path={models}/deep"], f"deep {name}".replace(",", "").replace(" ", "-")
    straight = run_train(world, recipe, name, *of, *words)
    run = cut_back(straight, f"{name}-again")
    run_train(world, recipe, run.name, *of, *words)
    assert losses(run) == losses(straight)
    assert all(torch.equal(export_of(run)[tensor], want) for tensor, want in export_of(straight).items())
    elsewhere = cut_back(straight, f"{name}-on-one")
    run_train(1, recipe, elsewhere.name, *of, *LAYOUTS["one"][1])
    assert losses(elsewhere) == pytest.approx(losses(straight), rel=TOLERANCE)
    for tensor, want in export_of(straight).items():
        assert relative_error(export_of(elsewhere)[tensor], want) < TOLERANCE, tensor


LOADED = ("train.steps=1", "optim.learning_rate=1e-30", "data.eval_size=0")
RANDOM = ("model.init=random", "train.seed=7")


@pytest.fixture(scope="module")
def models(tiny):
    write_models(tiny)
    return tiny


@pytest.mark.parametrize(
    ("world", "words", "model", "start"),
    [
        (4, ["parallel.tp_size=2"], "untied", ()),
        pytest.param(4, ["parallel.tp_size=2"], "nine", RANDOM, marks=pytest.mark.slow),
        (2, [*LOOPED, "train.gradient_accumulation_steps=2"], "deep", RANDOM),
        pytest.param(2, ["parallel.pp_size=2"], "untied", (), marks=pytest.mark.slow),
        pytest.param(3, ["parallel.pp_size=3", "parallel.stage=zero1"], "biased", RANDOM, marks=pytest.mark.slow),
        pytest.param(4, ["parallel.pp_size=2", "parallel.tp_size=2"], "deep", RANDOM, marks=pytest.mark.slow),
        pytest.param(4, ["parallel.pp_size=4", "parallel.stage=ddp"], "deep-untied", (), marks=pytest.mark.slow),
        pytest.param(4, ["parallel.tp_size=4"], "model", RANDOM, marks=pytest.mark.slow),
        pytest.param(4, ["parallel.tp_size=4"], "biased", (), marks=pytest.mark.slow),
        pytest.param(3, ["parallel.tp_size=3", "data.max_length=126"], "qwen2", (), marks=pytest.mark.slow),
    ],
)
def test_an_export_is_that_of_one_process_to_the_bit(world, words, model, start, recipe, models):
    """Of weights loaded, or drawn: a rate of 1e-30 moves none of them. Drawn ones are the same in any layout."""
    more = (*LOADED, *start, f"model.path={models}/{model}")
    name = f"{model}-{world}-{len(start)}"
    ours = export_of(run_train(world, recipe, f"{name}-cut", *more, *words))
    theirs = export_of(run_train(1, recipe, f"{name}-one", *more))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in theirs)
    if not start:
        source = load_file(models / model / "model.safetensors")
        assert all(torch.equal(ours[tensor], source[tensor]) for tensor in ours)


def draws_by_own_place(words):
    """Planted bug: weights begin as their place among those of the rank says, so two stages begin alike."""
    from shardbook.run import start

    def init_weights(model, *given, file_shapes, **named):
        real(model, *given, **named)

    real, start.init_weights = start.init_weights, init_weights
    return train_rank(words)


@pytest.mark.slow
def test_stages_that_begin_alike_turn_it_red(recipe, models):
    words = (*LOADED, *RANDOM, f"model.path={models}/deep-untied")
    want = export_of(run_train(1, recipe, "begun-one", *words))
    given = [str(recipe), "run.name=begun-alike", "parallel.pp_size=2", *words]
    assert [code for code, _, _ in run_world(2, draws_by_own_place, given)] == [0, 0]
    found = export_of(recipe.parent / "begun-alike")
    assert not all(torch.equal(found[tensor], want[tensor]) for tensor in want)
