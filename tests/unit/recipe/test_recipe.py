"""Recipes: strict keys, overrides, and errors that name the key, the value and the way out."""

import re
import tomllib

import pytest

from shardbook import cli
from shardbook.recipe import (
    RecipeError,
    describe_keys,
    dump_recipe,
    find_recipe,
    list_recipes,
    load_recipe,
    resolve_precision,
)
from shardbook.recipe.load import other_words, parse_recipe


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nsteps = 3\n[optim]\nlearning_rate = 2e-5\n")
    return path


def test_overrides_take_toml_literals_and_bare_strings(file):
    words = ["optim.learning_rate=1e-3", "run.name=first", "train.compile=true", 'data.train=["a/b", "c.jsonl"]']
    recipe = load_recipe(file, [*words, "optim.betas=[0.8, 0.9]", "method=sft", "run.project=a=b"])
    assert recipe.optim.learning_rate == 1e-3
    assert (recipe.run.name, recipe.run.project) == ("first", "a=b")
    assert recipe.train.compile is True
    assert recipe.data.train == ["a/b", "c.jsonl"]
    bare = load_recipe(
        file, ["data.train=[b/a.jsonl, ~/b.jsonl,owner/name:test]", "lora.r=8", "lora.target_modules=[q_proj,v_proj]"]
    )
    assert bare.data.train == ["b/a.jsonl", "~/b.jsonl", "owner/name:test"]
    assert bare.lora.target_modules == ["q_proj", "v_proj"]
    assert recipe.optim.betas == [0.8, 0.9]


def test_a_later_length_of_the_run_wins(file):
    """Over the other key in the file, and over an earlier override; a 0 takes nothing away."""

    def length(*words):
        train = load_recipe(file, list(words)).train
        return train.steps, train.epochs

    assert length("train.epochs=2") == length("train.epochs=2", "generate.steps=0") == (0, 2)
    assert length("train.epochs=2", "train.steps=7") == (7, 0) and length("train.epochs=0") == (3, 0)
    file.write_text(file.read_text().replace("steps = 3", "steps = 3\nepochs = 1"))
    with pytest.raises(RecipeError, match=r"steps = 3 and epochs = 1: set exactly one of the two above 0"):
        load_recipe(file)


def test_resolved_recipe_is_complete_and_loads_to_the_same(file, tmp_path):
    recipe = load_recipe(file, ["train.steps=0", "train.epochs=1.5", "optim.warmup_ratio=0.1"])
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_recipe(recipe))
    assert load_recipe(resolved) == recipe
    written = tomllib.loads(resolved.read_text())
    for name, _, _ in describe_keys():
        section, _, key = name.rpartition(".")
        assert key in (written[section] if section else written), name
    assert recipe.optim.warmup_steps == 0.1  # the old name is an alias
    assert load_recipe(file, ["optim.warmup_ratio=0.1", "optim.warmup_steps=7"]).optim.warmup_steps == 7
    assert load_recipe(resolved, ["optim.warmup_ratio=0.2"]).optim.warmup_steps == 0.2
    with pytest.raises(RecipeError, match=r"eval = 'x.jsonl' and eval_size = 3: set one of the two"):
        load_recipe(file, ["data.eval=x.jsonl", "data.eval_size=3"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.weights=[true, 1]", "data.weights.0 = True: input should be a valid integer or a valid number"),
        ("data.weights=[1, inf]", "data.weights.1 = inf: input should be a valid integer or a finite number"),
        ("data.train=5", "data.train = 5: input should be a valid string or a valid list"),
    ],
)
def test_a_value_of_neither_of_two_types_is_one_error(file, word, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(file, [word])
    assert str(error.value).removeprefix(f"{file}: ") == message


def test_every_key_has_one_line_of_help():
    for name, _, help in describe_keys():
        assert help and "\n" not in help and len(help) < 120, name


@pytest.mark.parametrize("name", ["1", "nan", "true", "1e3", "2026-11-29"])
def test_a_name_that_looks_like_a_number_is_a_name(file, name):
    assert load_recipe(file, [f"run.name={name}"]).run.name == name


def test_auto_precision(file):
    recipe = load_recipe(file)
    assert resolve_precision(recipe, "cpu").precision.params == "fp32"
    assert resolve_precision(recipe, "cuda").precision.params == "bf16"
    assert resolve_precision(load_recipe(file, ["precision.params=bf16"]), "cpu").precision.params == "bf16"


WRONG = {
    "optim.learning_rat=1": ["optim.learning_rat is not a key", "did you mean optim.learning_rate?"],
    "learning_rate=1": ["learning_rate is not a key", "did you mean optim.learning_rate?"],
    "optin.learning_rate=1": ["optin.learning_rate is not a key", "did you mean optim.learning_rate?"],
    "optim=adamw": ["optim = 'adamw': is a section; set a key of it, optim.<key>"],
    "optim.learning_rate=fast": ["optim.learning_rate = 'fast'", "number"],
    "optim.learning_rate=0.0": ["optim.learning_rate = 0.0", "greater than 0"],
    "optim.name=adam_8bit": ["optim.name = 'adam_8bit'", "'lion' or 'muon'; did you mean adamw_8bit?"],
    "precision.master=bf16": ["precision.master = 'bf16' and optim.name = 'adamw'", "set optim.name=adamw_bf16"],
    "optim.betas=[0.9, 1.5]": ["betas = [0.9, 1.5]", "below 1"],
    "method=distill": ["method = 'distill': needs distill.teacher"],
    "distill.temperature=2.0": ["distill.temperature = 2.0 and method = 'sft'", "only distill has it; leave it out"],
    "train.router_bias_update_rate=-0.001": ["router_bias_update_rate = -0.001", "greater than or equal to 0"],
    "distill.kd_ratio=1.5": ["distill.kd_ratio = 1.5", "less than or equal to 1"],
    "distill.temperature=0.0": ["distill.temperature = 0.0", "greater than 0"],
    "train.steps=1.5": ["train.steps = 1.5", "integer"],
    "train.steps=-1": ["train.steps = -1", "greater than or equal to 0"],
    "train.compile=1": ["train.compile = 1", "must be true or false"],
    "train.async_save=wai": [
        "train.async_save = 'wai': input should be true or false or 'auto' or 'wait'",
        "mean wait?",
    ],
    "train.async_save=1": ["train.async_save = 1: input should be true or false or 'auto' or 'wait'"],
    "train.steps=0": ["steps = 0 and epochs = 0", "exactly one"],
    "precision.params=fp16": ["precision.params = 'fp16'", "'fp32' or 'bf16'"],
    "activation.checkpointing=ful": ["activation.checkpointing = 'ful'", "did you mean full?"],
    "activation.checkpointing=every:0": ["activation.checkpointing = 'every:0'", "every:<whole number>"],
    "activation.checkpointing=budget:1.5": ["activation.checkpointing = 'budget:1.5'", "budget:<0.0 to 1.0>"],
    "activation.checkpointing=budget:0.5": ["'budget:0.5'", "set train.compile=true, or choose selective"],
    "parallel.forward_prefetch=-2": ["parallel.forward_prefetch = -2", "greater than or equal to -1"],
    "parallel.pipeline_chunks=2": ["parallel.pipeline_chunks = 2: there is no pipeline; set parallel.pp_size"],
    "parallel.pipeline_schedule=gpipe": ["parallel.pipeline_schedule = 'gpipe': there is no pipeline"],
    "parallel.pipeline_schedule=zb": [
        "parallel.pipeline_schedule = 'zb': input should be 'gpipe', '1f1b' or 'interleaved'"
    ],
    "parallel.tp_size=0": ["parallel.tp_size = 0", "greater than or equal to 1"],
    "parallel.cp_size=0": ["parallel.cp_size = 0", "greater than or equal to 1"],
    "parallel.cp_size=3": ["data.max_length = 1024 and parallel.cp_size = 3", "must be a multiple of 3"],
    "parallel.tp_size=3": ["data.max_length = 1024 and parallel.tp_size = 3", "must be a multiple of 3"],
    "run.report_to=wandbb": ["report_to = 'wandbb'", "did you mean wandb?"],
    "run.name=a/b": [
        "run.name = 'a/b': must be at most 100 letters, digits, '_', '.', '-', the first none of the last two"
    ],
    "run.name=" + 101 * "x": ["must be at most 100 letters, digits"],
    "data.foo=1": ["data.foo is not a key of a recipe; data has train, weights, columns, eval, "],
    "data.max_lenght=1": ["data.max_lenght is not a key of a recipe; did you mean data.max_length?"],
    "optin.foo=1": ["optin.foo is not a key of a recipe; did you mean optim?"],
    "run.name=..": ["run.name = '..'"],
    'run.report_to=["none", "wandb"]': ["none must be the only one"],
    "data.train=3": ["data.train = 3", "string"],
    "train.seed.x=3": ["train.seed = {'x': 3}"],
    "optim.warmup_steps=2.5": ["warmup_steps = 2.5", "whole"],
    "data.eval_size=1.5": ["eval_size = 1.5", "whole number"],
    "data.train_on=answers": ["data.train_on = 'answers'", "'assistant', 'last' or 'all'"],
    "data.weights=[1, 2]": ["weights = [1, 2]: needs one for each source of a list in train; it has 1 source"],
    'data={train = ["a.jsonl", "b.jsonl"], weights = [1, 0]}': ["weights = [1, 0]: each must be above 0"],
    'data={train = ["a.jsonl", "b.jsonl"], weights = [1]}': ["weights = [1]: needs one", "it has 2 sources"],
    "data.columns={promt = 'q'}": ["columns = {'promt': 'q'}: promt is not a field of a row", "did you mean prompt?"],
    "data.columns={prompt='q',completion='q'}": ["each column can be one field only"],
    "data.columns=question": ["data.columns = 'question'", "dictionary"],
    "data.weights=3": ["data.weights = 3", "list"],
    "data.system=3": ["data.system = 3", "string"],
    "data.chat_template=[]": ["data.chat_template = []", "string"],
    "data.chat_template_kwargs=3": ["data.chat_template_kwargs = 3", "dictionary"],
    "data.chat_template_date=may": ["data.chat_template_date: 'may' is no day; it must be as 2026-07-31"],
    "data.chat_template_kwargs={tools = []}": ["chat_template_kwargs = {'tools': []}: tools is set by the run itself"],
    "train.eval_steps=5": ["train.eval_steps = 5: needs data.eval or data.eval_size"],
    "generate.samples=2": ["steps = 0 and samples is set", "set generate.steps=100, or leave samples out"],
    'generate={steps=1,samples=2,prompts=["why"]}': ["prompts and samples = 2", "leave samples out"],
    'generate={steps=1,prompts=["why", " "]}': ["prompts = ['why', ' ']: one of them is empty"],
    "generate.temperature=-1.0": ["generate.temperature = -1.0", "greater than or equal to 0"],
    "nonsense": ["'nonsense'", "section.key=value"],
    "method=kto": ["method = 'kto'", "every layout would train another model", "preference.loss_type=apo_zero"],
    "preference.beta=0.2": ["preference.beta = 0.2 and method = 'sft': only dpo or orpo or simpo has it"],
    "preference.beta=0": ["preference.beta = 0", "greater than 0"],
    "preference.loss_type=sigmoids": ["loss_type = 'sigmoids'", "did you mean sigmoid?"],
    "method=ppo": ["method = 'ppo'", "'sft'"],
}


@pytest.mark.parametrize("word", WRONG)
def test_wrong_recipes_exit_2_with_one_line(file, word, capsys):
    assert cli.main(["train", str(file), word]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    for part in WRONG[word]:
        assert part in captured.err


def test_contradictions_are_looked_for_where_each_key_is_right(file, capsys):
    words = ["parallel.tp_size=2", "optim.name=muon"]
    assert cli.main(["train", str(file), "optim.learning_rate=fast", *words]) == 2
    wrong = capsys.readouterr().err
    assert "optim.learning_rate = 'fast'" in wrong and "do not compose" not in wrong
    assert cli.main(["train", str(file), *words]) == 2
    assert "parallel.tp_size = 2 and optim.name = 'muon': they do not compose" in capsys.readouterr().err


PAIRS = {
    ("method=simpo", "preference.loss_type=ipo"): "preference.loss_type = 'ipo' and method = 'simpo': only dpo has it",
    ("method=dpo", "preference.simpo_gamma=1.0"): "only simpo has it",
    ("method=dpo", "preference.label_smoothing=0.1"): "only loss_type = 'robust' has it",
    ("method=dpo", "preference.loss_type=robust", "preference.label_smoothing=0.5"): "must be below 0.5",
    ("method=dpo", "preference.precompute_ref_log_probs=false"): "without lora.r the reference is gone",
    (
        "method=dpo",
        "lora.r=4",
        'lora.modules_to_save=["norm"]',
        "preference.precompute_ref_log_probs=false",
    ): "with lora.modules_to_save = ['norm'] the reference is gone",
    ("method=reward", "generate.steps=1"): "a reward model generates no text",
}


@pytest.mark.parametrize("words", PAIRS)
def test_wrong_preferences_exit_2_with_one_line(file, words, capsys):
    assert cli.main(["train", str(file), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert PAIRS[words] in captured.err


TENSOR = {  # what does not go with tensor parallel, and the way out
    ("parallel.stage=zeropp",): "set parallel.stage=zero3",
    ("parallel.stage=hsdp", "parallel.secondary_shard=2"): "leave parallel.quantize_weights",
    ("lora.r=4", "lora.lora_dropout=0.1"): "set lora.lora_dropout=0",
    ("optim.name=muon",): "set optim.name=adamw",
}


@pytest.mark.parametrize("words", TENSOR, ids=" ".join)
def test_what_does_not_compose_with_tensor_parallel_exits_2(file, words, capsys):
    assert cli.main(["train", str(file), "parallel.tp_size=2", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert "parallel.tp_size = 2 and" in captured.err and TENSOR[words] in captured.err


CONTEXT = {  # and with context parallel
    ("parallel.stage=zeropp",): "set parallel.stage=zero3",
    ("parallel.stage=hsdp", "parallel.secondary_shard=2"): "leave parallel.quantize_weights",
    ("model.attention=eager",): "set model.attention=sdpa",
}


@pytest.mark.parametrize("words", CONTEXT, ids=" ".join)
def test_what_does_not_compose_with_context_parallel_exits_2(file, words, capsys):
    assert cli.main(["train", str(file), "parallel.cp_size=2", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert "parallel.cp_size = 2 and" in captured.err and CONTEXT[words] in captured.err


PIPELINE = {  # and with pipeline parallel
    ("parallel.stage=zeropp",): "set parallel.stage=zero3",
    ("parallel.stage=hsdp", "parallel.secondary_shard=2"): "leave parallel.quantize_weights",
    ("offload.activations=cpu", "activation.checkpointing=full"): "leave [offload] out",
    ("parallel.pipeline_schedule=interleaved",): "set parallel.pipeline_chunks=2, or leave both out",
    ("parallel.pipeline_chunks=2",): "set parallel.pipeline_schedule=interleaved, or leave both out",
    (
        "parallel.pipeline_schedule=interleaved",
        "parallel.pipeline_chunks=2",
        "train.gradient_accumulation_steps=3",
    ): "must be a multiple of 2",
}


@pytest.mark.parametrize("words", PIPELINE, ids=" ".join)
def test_what_does_not_compose_with_pipeline_parallel_exits_2(file, words, capsys):
    assert cli.main(["train", str(file), "parallel.pp_size=2", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert "parallel.p" in captured.err and PIPELINE[words] in captured.err


USERS_WORDS = {
    "optim.lr": "optim.learning_rate",
    "lr": "optim.learning_rate",
    "batch_size": "train.per_device_train_batch_size",
    "train.micro_batch_size": "train.per_device_train_batch_size",
    "data.max_seq_length": "data.max_length",
    "bf16": "precision.params=bf16 (compute and gathers; auto does so on a GPU)",
    "fsdp": "parallel.stage=zero3",
    "parallel.fsdp": "parallel.stage=zero3",
    "num_train_epochs": "train.epochs",
    "train.max_steps": "train.steps",
    "output_dir": "run.dir (the run's directory in it: run.name)",
    "train.gradient_checkpointing": "activation.checkpointing=full (or selective)",
    "model_name_or_path": "model.path",
    "optimizer.lr": "optim.learning_rate",
    "parallelism.data_parallel_shard_degree": "parallel.dp_shard_size",
    "parallelism.tensor_parallel_degree": "parallel.tp_size",
    "parallelism.context_parallel_degree": "parallel.cp_size",
    "context_parallel_size": "parallel.cp_size",
    "parallel.sp_size": "parallel.cp_size",
    "sequence_parallel_size": "parallel.cp_size",
    "ring_attn_func": "parallel.cp_size (slices of rows are exchanged for heads, nothing goes round a ring)",
    "pipeline_model_parallel_size": "parallel.pp_size",
    "parallelism.pipeline_parallel_degree": "parallel.pp_size",
    "pp_schedule": "parallel.pipeline_schedule (1f1b, gpipe or interleaved)",
    "virtual_pipeline_model_parallel_size": ("parallel.pipeline_chunks (and parallel.pipeline_schedule=interleaved)"),
    "preference.reference_free": "method=simpo (or orpo): dpo has a reference",
    "preference.ref_model": "model.path (the reference is the model that the run begins with)",
    "preference.desirable_weight": (
        "method=dpo with preference.loss_type=apo_zero: weights are of kto, whose loss is of a whole batch"
    ),
    "BF16": "precision.params=bf16 (compute and gathers; auto does so on a GPU)",
}


@pytest.mark.parametrize("word", USERS_WORDS)
def test_other_programs_words_get_the_right_key(file, word):
    with pytest.raises(RecipeError) as error:
        load_recipe(file, [f"{word}=1"])
    assert str(error.value).endswith(f"{word} is not a key of a recipe; here it is {USERS_WORDS[word]}")


@pytest.mark.parametrize(
    "word, meant",
    [
        ("stage", "parallel.stage"),
        ("cp_size", "parallel.cp_size"),
        ("training.steps", "train.steps or generate.steps"),
        ("train.learning_rate", "optim.learning_rate"),
        ("name", "optim.name or run.name"),
        ("optim.epz", "optim.eps"),
        ("parallel.stagee", "parallel.stage"),
    ],
)
def test_a_key_of_another_section_and_a_misspelt_one(file, word, meant):
    with pytest.raises(RecipeError, match=re.escape(f"{word} is not a key of a recipe; did you mean {meant}?")):
        load_recipe(file, [f"{word}=1"])


def test_a_teacher_that_is_not_heard_is_refused(file):
    with pytest.raises(RecipeError, match=r"distill.kd_ratio = 0 and method = 'distill': .* not used; set a share"):
        load_recipe(file, ["method=distill", "distill.teacher=x", "distill.kd_ratio=0"])


def test_every_word_leads_to_a_key_and_is_none_itself():
    known = {name for name, _, _ in describe_keys()}
    leaves = {name.rpartition(".")[2] for name in known}
    for word, key in other_words().items():
        assert word not in leaves and word == word.lower(), word
        assert key.startswith("--nproc ") or all(name in known for name in re.findall(r"[a-z]+\.[a-z]\w*", key)), key


def test_recipe_not_found_lists_the_close_ones(capsys):
    assert cli.main(["train", "smollm-135m-fsdp"]) == 2
    error = capsys.readouterr().err
    assert "smollm-135m-fsdp" in error and "smollm2-135m-fsdp" in error and error.count("\n") == 1
    assert cli.main(["train", "zzz"]) == 2
    assert "llama70b-fsdp" in capsys.readouterr().err


def test_ranks_and_overrides_in_any_order(file, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(cli, "run_train", lambda *words: asked.append(words) or 0)
    for words in (["a=1", "b=2", "--nproc", "3"], ["--nproc", "3", "a=1", "b=2"], ["a=1", "--nproc", "3", "b=2"]):
        assert cli.main(["train", "x", *words]) == 0
    assert asked == [("x", ["a=1", "b=2"], 3, (1, 0, ""), False, 0)] * 3
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "x", "--unknown=1"])
    monkeypatch.undo()
    assert cli.main(["train", str(file), "--nproc", "0"]) == 2
    assert "--nproc 0: must be at least 1" in capsys.readouterr().err


def test_not_toml_and_not_readable(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(RecipeError, match=r"broken.toml: not TOML"):
        load_recipe(broken)
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "absent.toml")


def test_recipes_are_found_by_name_and_listed(capsys):
    assert find_recipe("llama70b-hsdp") == list_recipes()["llama70b-hsdp"]
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(list_recipes())
    assert all(len(line.split()) > 4 for line in lines)


def test_samples_are_turned_off_behind_a_recipe_that_takes_them():
    """An explicit 0 says so; keys of [generate] without `steps` would be ignored without a word, and are refused."""
    path = find_recipe("smollm2-135m-fsdp")
    assert load_recipe(path).generate.count == 2
    off = load_recipe(path, ["generate.steps=0"])
    assert off.generate.steps == 0 and parse_recipe(dump_recipe(off), "resolved.toml") == off
