"""A reward model under every stage: the numbers of transformers' classifier in one plain process; files both ways."""

import itertools
import shutil
from dataclasses import replace
from functools import cache

import peft
import pytest
import reference
import torch
from cases import DECAY, MAX_NORM, RATE, TOLERANCE, Case, assert_case, assert_events, layouts, outcomes_of, run_cases
from pairs import DIFFERENCE, all_but_speed, answers_of_first, go_on_from, pairs_of_steps
from tiny import CHATML, tokenizer, write_model, write_pairs
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from world import losses, metrics, run_train, run_world, train_rank

load = AutoModelForSequenceClassification.from_pretrained


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 24)


@pytest.fixture(scope="module")
def scorer(tiny, tmp_path_factory):
    """A classifier's directory, as transformers writes it."""
    folder = tmp_path_factory.mktemp("scorer")
    torch.manual_seed(3)
    model = load(tiny / "model", num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def words_of(pairs, scorer) -> tuple[str, ...]:
    return ("method=reward", f"data.train={pairs}", "data.max_length=96", f"model.path={scorer}")


@pytest.fixture(scope="module")
def wanted_of(recipe, tiny, pairs, scorer):
    @cache
    def train(rows: int, clips: bool, more: tuple[str, ...], steps: int) -> reference.Result:
        model = load(scorer, dtype=torch.float64, attn_implementation="eager")
        words = (*words_of(pairs, scorer), *more)
        picked = pairs_of_steps(recipe, tiny, words, rows, steps)
        ids = [[(chosen[0], rejected[0]) for chosen, rejected in step] for step in picked]
        result = reference.train_scores(model, ids, RATE, DECAY, MAX_NORM if clips else 0.0)
        result.rows = answers_of_first(recipe, tiny, words, rows)
        return result

    def of(case: Case) -> reference.Result:
        more = tuple(word for word in case.extra if word.startswith("data.") and word not in words_of(pairs, scorer))
        return train(case.rows, case.clips, more, case.steps)

    return of


def cases_of(pairs, scorer) -> list[Case]:
    options = itertools.cycle([(1, False, False, "none"), (3, True, False, "full"), (2, False, False, "selective")])
    every = layouts(2)
    return [Case(*layout, *next(options), extra=words_of(pairs, scorer)) for layout in every]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [("zero3",), ("ddp", "zero1", "zero2", "hsdp")])
def test_stages_are_transformers(stages, recipe, tiny, pairs, scorer, wanted_of, tmp_path):
    chosen = [case for case in cases_of(pairs, scorer) if case.stage in stages]
    for world in {case.world for case in chosen}:
        those = [case for case in chosen if case.world == world]
        assert run_world(world, run_cases, recipe, tiny, those, tmp_path) == [[]] * world
    for case in chosen:
        assert_case(case, outcomes_of(case, tmp_path), wanted_of(case), DIFFERENCE)


ROOM = ("data.max_length=252",)  # rows of several pairs, which slices cut, and of which three ranks have thirds
PADDED = ("data.packing=false",)
BESIDE = [  # those of one world run in it together
    Case("zero2", 1, 1, 3, True, False, "full", pp=2, steps=5),
    Case("zero3", 1, 1, 3, True, False, "full", ROOM, cp=2, steps=5),
    Case("zero3", 1, 1, 3, True, False, "full", tp=2, steps=5),
    Case("ddp", 1, 1, 2, False, False, "none", ROOM, tp=2),
]
BESIDE_TOO = [
    Case("zero3", 1, 2, 2, True, False, pp=2),
    Case("ddp", 2, 1, 2, False, False, "selective", PADDED, pp=2, schedule="gpipe"),
    Case("zero1", 1, 1, 3, True, False, pp=3),
    Case("hsdp", 2, 1, 2, True, False, extra=ROOM, cp=2),
    Case("ddp", 2, 1, 2, False, False, "selective", PADDED, cp=2),
    Case("zero2", 1, 1, 2, True, False, extra=ROOM, cp=3),
    Case("zero1", 1, 1, 2, False, False, extra=ROOM, cp=4),
    Case("zero3", 1, 2, 3, True, False, "full", tp=2),
    Case("zero2", 1, 1, 2, True, False, extra=ROOM, tp=3),
    Case("zero1", 1, 1, 3, True, False, extra=(*PADDED, "train.per_device_train_batch_size=2"), tp=4),  # idle ranks
    Case("ddp", 2, 1, 2, True, False, tp=2),
    Case("hsdp", 1, 2, 2, True, False, tp=2),
    Case("zero3", 1, 1, 2, True, False, "full", pp=2, tp=2),
    Case("zero2", 1, 1, 3, True, False, extra=ROOM, cp=2, tp=2, steps=5),
    Case("zero3", 1, 1, 2, True, False, extra=ROOM, cp=2, pp=2),
]


@pytest.mark.parametrize("beside", [BESIDE, pytest.param(BESIDE_TOO, marks=pytest.mark.slow)], ids=["few", "others"])
def test_beside_other_axes(beside, recipe, tiny, pairs, scorer, wanted_of, tmp_path):
    """Along cp the last token of an answer lies on one rank; along tp every rank has all scores."""
    chosen = [replace(case, extra=(*words_of(pairs, scorer), *case.extra)) for case in beside]
    for world in {case.world for case in chosen}:
        those = [case for case in chosen if case.world == world]
        assert run_world(world, run_cases, recipe, tiny, those, tmp_path) == [[]] * world
    for case in chosen:
        worst = assert_case(case, outcomes_of(case, tmp_path), wanted_of(case), DIFFERENCE)
        assert_events(outcomes_of(case, tmp_path))
        print(f"\nworst {worst:.1e}  {case.layout}")


def test_scores_with_a_gradient_on_each_rank_are_seen(recipe, tiny, pairs, scorer, wanted_of, tmp_path):
    """Planted bug: what is summed along tp is the whole gradient of each rank. Loss exact."""
    case = replace(BESIDE[3], extra=words_of(pairs, scorer))
    assert run_world(2, run_with_all_gradients, recipe, tiny, [case], tmp_path) == [[]] * 2
    (outcome, _), want = outcomes_of(case, tmp_path), wanted_of(case)
    assert outcome.result.losses[0] == pytest.approx(want.losses[0], rel=DIFFERENCE)
    assert outcome.result.norms[0] == pytest.approx(2 * want.norms[0], rel=DIFFERENCE)


def run_with_all_gradients(*given):
    from shardbook.model.loss_head import ScoreHead

    ScoreHead.share_of = property(lambda head: None, lambda head, share_of: None)
    return run_cases(*given)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["cp", "pp", "tp"])
def test_metrics_are_those_without_an_axis_and_a_kill_goes_on_bitwise(axis, recipe, tiny, pairs, straight):
    words = (*SAVING, *words_of(pairs, tiny / "model"), "train.gradient_accumulation_steps=2")
    run = run_train(2, recipe, f"{axis}-straight", *words, f"parallel.{axis}_size=2")
    for one, two in zip(all_but_speed(straight), all_but_speed(run), strict=True):
        assert two == pytest.approx(one, rel=DIFFERENCE, abs=DIFFERENCE)
    again = go_on_from(run, f"{axis}-again", 4)
    run_train(2, recipe, again.name, *words, f"parallel.{axis}_size=2")
    assert all_but_speed(again) == all_but_speed(run)
    there, here = (load(each / "export", dtype=torch.float32).state_dict() for each in (straight, run))
    assert all(torch.allclose(here[name], there[name], rtol=1e-4, atol=1e-5) for name in there)


SAVING = ("train.steps=6", "train.save_steps=2")


@pytest.fixture(scope="module")
def straight(recipe, tiny, pairs):
    """From a language model, whose head is left behind."""
    return run_train(2, recipe, "straight", *SAVING, *words_of(pairs, tiny / "model"))


def held_out_loss(model, recipe, tiny, words) -> float:
    from shardbook.data.tokenized import build_documents
    from shardbook.recipe import load_recipe

    data = load_recipe(recipe, words).data
    _, held_out = build_documents(data, AutoTokenizer.from_pretrained(tiny / "model"), tiny / "model", 2)
    parts = []
    for row in held_out.rows:
        for number in row:
            document = held_out.encoded[number]
            ids, cut = document["input_ids"], document["lengths"][0]
            with torch.no_grad():
                chosen, rejected = (
                    model(input_ids=torch.tensor(side)[None]).logits[0, 0] for side in (ids[:cut], ids[cut:])
                )
            parts.append(torch.log1p(torch.exp(rejected - chosen)).item())
    return sum(parts) / len(parts)


def test_the_export_is_a_classifier_of_transformers(recipe, tiny, pairs, straight):
    words = words_of(pairs, tiny / "model")
    model = load(straight / "export", dtype=torch.float32)
    rows = metrics(straight)
    assert rows[-1]["eval/loss"] == pytest.approx(held_out_loss(model, recipe, tiny, words), rel=TOLERANCE)
    assert {"train/accuracy", "train/margin", "train/mean_reward"} <= rows[1].keys()
    assert model.config.num_labels == 1
    # rows of several lengths at once, which end as those that were trained do
    rows = [torch.tensor([*range(3, 3 + length), 258]) for length in (2, 5)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    together = model(input_ids=padded, attention_mask=(padded != model.config.pad_token_id).long()).logits
    apart = torch.cat([model(input_ids=row[None]).logits for row in rows])
    assert together.shape == (2, 1) and torch.allclose(together, apart, rtol=1e-5, atol=1e-7)
    assert AutoTokenizer.from_pretrained(straight / "export").pad_token_id == model.config.pad_token_id


@pytest.mark.filterwarnings("default")
def test_nothing_is_warned_of(recipe, tiny, pairs):
    words = [str(recipe), "run.name=quiet", "train.steps=1", "train.export=false", *words_of(pairs, tiny / "model")]
    for code, out, err in run_world(2, train_rank, words):
        assert code == 0 and "view" not in out + err, out + err


def test_a_kill_goes_on_bitwise(recipe, tiny, pairs, straight):
    run = go_on_from(straight, "again", 4)
    run_train(2, recipe, "again", *SAVING, *words_of(pairs, tiny / "model"))
    assert all_but_speed(run) == all_but_speed(straight)


@pytest.mark.slow
def test_an_adapter_whose_base_pads_with_what_ends_its_rows_scores_as_here(recipe, tiny, pairs, tmp_path):
    """Its tokenizer has another padding, and the console says that the base model's config must take it."""
    end = AutoTokenizer.from_pretrained(tiny / "model").convert_tokens_to_ids("<|im_end|>")
    write_model(tmp_path / "base", pad_token_id=end)
    (tmp_path / "ends.jinja").write_text(CHATML.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}"))
    words = (*words_of(pairs, tmp_path / "base"), "lora.r=4", f"data.chat_template={tmp_path}/ends.jinja")
    results = run_world(2, train_rank, [str(recipe), "run.name=ends", "train.steps=3", *words])
    assert [code for code, _, _ in results] == [0, 0], results
    export = recipe.parent / "ends" / "export"
    padding = AutoTokenizer.from_pretrained(export).pad_token_id
    assert f"needs model.config.pad_token_id = {padding} before it scores" in results[0][1] and padding != end
    plain = load(tmp_path / "base", num_labels=1, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, export).eval()
    mine, theirs = metrics(export.parent)[-1]["eval/loss"], lambda: held_out_loss(model, recipe, tiny, words)
    assert theirs() != pytest.approx(mine, rel=1e-4)
    model.config.pad_token_id = padding
    assert theirs() == pytest.approx(mine, rel=TOLERANCE)


@pytest.mark.slow
def test_adapters_and_a_head_of_their_own(recipe, tiny, pairs, tmp_path):
    """The score is trained whole beside them, and peft reads both."""
    words = (*words_of(pairs, tiny / "model"), "lora.r=4")
    run = run_train(2, recipe, "adapted", "train.steps=3", "parallel.stage=zero3", *words)
    plain = load(tiny / "model", num_labels=1, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, run / "export").eval()
    assert metrics(run)[-1]["eval/loss"] == pytest.approx(held_out_loss(model, recipe, tiny, words), rel=TOLERANCE)
    shutil.rmtree(run / "export")
    again = run_train(
        1, recipe, "adapted-ddp", "train.steps=3", "parallel.stage=ddp", *words, "train.gradient_accumulation_steps=2"
    )
    assert losses(again) == pytest.approx(losses(run), rel=DIFFERENCE)
