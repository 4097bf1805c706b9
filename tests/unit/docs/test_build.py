"""The site: its generated pages are those of the code, its links lead somewhere, and its commands are commands."""

import importlib.util
import itertools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from contrast import contrast, read_palette

from shardbook.cli import PLAIN, build_parser
from shardbook.recipe import describe_keys, load_recipe, parse_recipe

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
GOALS = sorted((DOCS / "goals").glob("*.md"))
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "benchmarks")


def load_build():
    spec = importlib.util.spec_from_file_location("docs_build", DOCS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


@pytest.mark.parametrize("page", ["keys.md", "recipes.md", "commands.md", "metrics.md", "exit-codes.md"])
def test_a_generated_page_is_what_the_code_says(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (DOCS / "reference" / page).read_text() == build.pages()[page], "make reference"


def odd_rows(text):
    """The rows of tables with more or fewer cells than their header, whose last cells no reader would see."""
    header, is_code = 0, False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if is_code or not line.startswith("|"):
            header = 0
            continue
        cells = re.sub(r"`[^`]*`|\\\\\|", "", line).strip().count("|")
        header = header or cells
        if cells != header:
            yield line


def test_a_row_of_a_table_has_the_cells_of_its_header():
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    assert not [(page.name, row) for page in pages for row in odd_rows(page.read_text())]
    assert [*odd_rows("| a | b |\n|---|---|\n| `x|y` | 1 |\n| 2 | 3 | | 4 | 5 |\n")] == ["| 2 | 3 | | 4 | 5 |"]


def test_every_key_and_every_recipe_has_its_entry():
    keys, recipes = (build.pages()[page] for page in ("keys.md", "recipes.md"))
    for name, _, help in describe_keys():
        assert help and f"### {name}\n\n{help}\n" in keys
    for path in (ROOT / "recipes").glob("*.toml"):
        entry = recipes.partition(f"## {path.stem}\n")[2].partition("\n## ")[0]
        assert all(f"**{fact}:**" in entry for fact in ("run", "hardware", "measured")), path.stem


def test_every_key_is_in_a_recipe_or_on_a_page():
    """A key that none of them needs is one that nobody sets. (docs/reference lists all.)"""
    recipes = [tomllib.loads(path.read_text()) for path in (ROOT / "recipes").glob("*.toml")]
    tables = [(section, table) for recipe in recipes for section, table in recipe.items() if isinstance(table, dict)]
    used = {f"{section}.{key}" for section, table in tables for key in table} | {"method"}
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts]
    codes = [code for page in pages for code in re.findall(r"`([^`\n]+)`|^(\w+) = ", page, re.MULTILINE)]
    named = {word for code in codes for word in re.findall(r"[\w.]+", " ".join(code))}
    keys = [name for name, _, _ in describe_keys()]
    assert not [name for name in keys if not {name, name.rpartition(".")[2]} & (used | named)]


METRIC = re.compile(r"""f?"(?:train|eval|memory|comm|perf|rewards|logps|offload)/[^"\s]*[^"\s/]\"""")


def test_every_metric_has_its_row():
    known = re.findall(r"`([^`]+)`", build.write_metrics())
    shapes = {re.sub(r"<\w+>", "X", name) for name in known}
    for path in (ROOT / "src/shardbook").rglob("*.py"):
        for text in METRIC.findall(path.read_text()):
            name = text.removeprefix("f").strip('"')
            if path.parts[-2] not in ("compare", "plan"):
                shape = re.sub(r"\{\w+\}", "X", name)
                like = re.compile(re.escape(shape).replace("X", "[^/]+"))
                assert any(like.fullmatch(each) or each.endswith(f"/{shape}") for each in shapes), (
                    f"{path.name}: {name}"
                )


def test_links_lead_somewhere_and_the_site_builds_strictly(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "SITE", ROOT / "site" / "html")
    assert build.build_site() == 0, capsys.readouterr().err
    pages = [*(ROOT / "site" / "html").rglob("index.html")]
    assert len(pages) > 40 and (ROOT / "site" / "html" / "llms.txt").exists()
    for page in pages:
        text = page.read_text()
        for target in re.findall(r'<(?:a|img)[^>]*? (?:href|src)="([^"#]+)[#"]', text):
            if "://" not in target and not target.startswith(("data:", "mailto:")) and "/files/" not in str(page):
                there = (page.parent / target).resolve()
                assert there.exists() or (there / "index.html").exists(), f"{page}: {target}"
        assert all("alt=" in image for image in re.findall(r"<img[^>]*>", text)), page
        levels = [int(level) for level in re.findall(r"<h([1-6])[ >]", text.partition("<article")[2])]
        assert levels and levels[0] == 1, page
        assert "/files/" in str(page) or all(after - before <= 1 for before, after in itertools.pairwise(levels)), page

    check_contrast(ROOT / "site" / "html" / "assets")


def check_contrast(assets):
    """Text, links and code can be read in both schemes: WCAG asks for 4.5 of text of this size."""
    assert contrast({"--md-default-bg-color": "#fff", "a": "#000"}, "a", "--md-default-bg-color") == pytest.approx(21)
    for scheme in ("light", "dark"):
        palette = read_palette(assets, scheme)
        of_page = ("--md-default-fg-color", "--md-default-fg-color--light", "--md-typeset-a-color")
        pairs = [(name, "--md-default-bg-color") for name in of_page] + [("--md-code-fg-color", "--md-code-bg-color")]
        pairs += [(name, "--md-code-bg-color") for name in palette if re.fullmatch(r"--md-code-hl-\w+-color", name)]
        low = {name: round(ratio, 2) for name, behind in pairs if (ratio := contrast(palette, name, behind)) < 4.5}
        assert len(pairs) > 14 and not low, scheme
        assert contrast(palette | {"--md-typeset-a-color": "#7f7f7f80"}, *pairs[2]) < 4.5  # what is too faint is seen


def test_a_link_to_nothing_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "stage", lambda: ["docs/index.md: gone.md"])
    assert build.build_site() == 1 and "docs/index.md: gone.md" in capsys.readouterr().err


SECTIONS = "|".join(sorted({name.partition(".")[0] for name, _, _ in describe_keys() if "." in name}))
KEY = re.compile(rf"(?<![\w./-])((?:{SECTIONS})\.[a-z]\w*)(?![\w./(])")


def unknown_keys(text: str) -> set[str]:
    """The keys that a page names in backquotes or in commands, and that no recipe has."""
    named = {key for quoted in re.findall(r"`([^`\n]+)`", text) for key in KEY.findall(quoted)}
    files = {"toml", "py", "json", "jsonl", "csv", "tsv", "svg", "html", "md", "parquet", "safetensors", "layers"}
    return {key for key in named - {name for name, _, _ in describe_keys()} if key.rpartition(".")[2] not in files}


@pytest.mark.parametrize("page", GOALS, ids=lambda page: page.stem)
def test_keys_that_a_goal_names_are_keys(page):
    assert unknown_keys(page.read_text()) == set()
    assert unknown_keys("set `train.step`") == {"train.step"}


def commands_of(text: str) -> list[list[str]]:
    """The commands in a page's blocks, as words of `shardbook`: those of make in its terms."""
    found = []
    for block in re.findall(r"```\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"] and words[1:] not in (["test"], ["recipes"]):
                given = dict(word.split("=", 1) for word in words[2:])
                recipe, more = given.pop("RECIPE", "smollm2-135m-fsdp"), shlex.split(given.pop("ARGS", ""))
                options = {
                    "plan": {"GPUS": "--gpus", "GPU": "--gpu"},
                    "compare": {"STAGES": "--stages", "NPROC": "--nproc"},
                }
                flags = options.get(words[1], {})
                assert words[1] in {"train", "plan", "data", "compare", "launch"}, line
                assert words[1] == "launch" or given.keys() <= flags.keys() | {"NPROC"}, line
                found.append(
                    [
                        words[1],
                        recipe,
                        *more,
                        *(w for name, v in given.items() if name in flags for w in (flags[name], v)),
                    ]
                )
            elif words and words[0].endswith("shardbook"):
                found.append(words[1:])
    return found


EVERY = [
    (page.stem, words)
    for page in [*GOALS, DOCS / "index.md", ROOT / "README.md"]
    for words in commands_of(page.read_text())
]


@pytest.mark.parametrize(
    ("page", "words"), EVERY, ids=lambda part: part if isinstance(part, str) else " ".join(part)[:60]
)
def test_the_commands_of_a_goal_name_recipes_and_keys(page, words):
    parser, commands = build_parser()
    _, rest = parser.parse_known_args(["train" if words[0] == "launch" else words[0], *words[1:]])
    assert all("=" in word and word[0] != "-" for word in rest) or words[0] == "launch"
    if (words[0] in commands and words[0] not in ("train", "plan", "data", "compare")) or words[1].endswith(".toml"):
        return
    if words[1].startswith("-"):  # plan --model
        parse_recipe(PLAIN, "--model", [word for word in words if re.match(r"[a-z]+\.\w+=", word)])
        return
    overrides = [word for word in words[2:] if "=" in word and not word.startswith("-")]
    load_recipe(ROOT / "recipes" / f"{words[1]}.toml", overrides)


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for _, words in EVERY if words[0] == "plan"], ids=" ".join)
def test_the_plans_of_the_goals_fit(words, monkeypatch, capsys, tmp_path):
    from shardbook.cli import main

    monkeypatch.chdir(ROOT)
    words = [str(tmp_path / word) if before == "--write" else word for before, word in itertools.pairwise(["", *words])]
    assert main(words) == 0, capsys.readouterr().err
    assert "fit" in capsys.readouterr().out


def test_a_command_that_changed_turns_it_red():
    assert commands_of("```\nmake plan RECIPE=llama8b-fsdp GPUS=8\n```") == [["plan", "llama8b-fsdp", "--gpus", "8"]]
    with pytest.raises(AssertionError):
        commands_of("```\nmake trian RECIPE=llama8b-fsdp\n```")


def test_every_goal_is_under_two_screens():
    assert {
        page.stem: len(page.read_text().splitlines()) for page in GOALS if len(page.read_text().splitlines()) > 75
    } == {}


def test_the_tool_says_what_it_can_do(capsys):
    assert build.main(["nothing"]) == 2 and "docs/build.py site" in capsys.readouterr().err
