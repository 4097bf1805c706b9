"""The house rules that a machine can check: who imports whom, how long a room may grow, what it may not be called."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardbook"
# A room imports only what stands below it; inside a room files may import each other, but not in a circle.
FLOORS = [
    {"cli", "evaluate"},
    {"train", "compare", "translate"},
    {"run"},
    {"plan", "objectives"},
    {"memory"},
    {"data", "optim", "ranks"},
    {"parallel"},
    {"model"},
    {"comm", "cache", "gpus"},
    {"recipe", "boxes", "local_tensors"},
    {"axes", "arithmetic", "paths", "terminal"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    return {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}


def room_of(relative: str) -> str:
    return relative.removesuffix(".py").split("/")[0]


def imported_rooms(tree: ast.Module) -> set[str]:
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "shardbook":
            rooms |= {alias.name for alias in node.names}
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        rooms |= {name.split(".")[1] for name in names if name and name.startswith("shardbook.")}
    return rooms


TREES = {name: ast.parse(path.read_text()) for name, path in modules().items()}


def upward(room: str, imported: set[str]) -> list[str]:
    allowed = {below for below in FLOOR if FLOOR[below] > FLOOR[room]} | {room}
    return sorted(imported - allowed)


@pytest.mark.parametrize("relative", [name for name in TREES if name != "__init__.py"])
def test_imports_point_down(relative):
    room = room_of(relative)
    assert room in FLOOR, f"{relative}: a new room; give it a floor"
    assert not upward(room, imported_rooms(TREES[relative])), f"{relative} imports upward"


def test_the_rule_sees_an_upward_import():
    planted = ast.parse("import shardbook.parallel.mesh\nfrom shardbook import train\n")
    assert upward("data", imported_rooms(planted)) == ["train"]


def imported_files(relative: str) -> set[str]:
    """The files of the house that one imports when it is imported itself."""
    names = set()
    for node in TREES[relative].body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardbook"):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    paths = {name.removeprefix("shardbook").replace(".", "/").strip("/") for name in names} - {""}
    files = {f"{path}.py" for path in paths} | {f"{path}/__init__.py" for path in paths}
    return files & TREES.keys()


def circle(imports: dict[str, set[str]]) -> list[str]:
    """A way from a file back to itself, or nothing."""
    done: set[str] = set()

    def walk(file: str, way: list[str]) -> list[str]:
        if file in way:
            return [*way[way.index(file) :], file]
        if file in done:
            return []
        found = next((way_back for other in imports[file] if (way_back := walk(other, [*way, file]))), [])
        done.add(file)
        return found

    return next((found for file in imports if (found := walk(file, []))), [])


@pytest.mark.parametrize("name", ["rendezvous", "heartbeat", "exits", "progress", "peer_errors"])
def test_what_watches_over_ranks_knows_nothing_of_what_they_do(name):
    allowed = {f"ranks/{other}.py" for other in ("rendezvous", "heartbeat", "exits", "progress", "peer_errors")}
    allowed |= {"recipe/__init__.py", "comm/torch_private.py", "ranks/launchers.py"}
    assert imported_files(f"ranks/{name}.py") <= allowed


def test_no_file_imports_itself_in_a_circle():
    assert circle({name: imported_files(name) for name in modules()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


TESTS = Path(__file__).parents[1]
OTHERS = {"bench": "tests/bench", "support": "tests/support", "docs": "docs"}  # no rooms of the package


def module_under_test(test: str) -> Path | None:
    """The file that <room>/test_<module>.py tests, or test_<module>_<aspect>.py: of test_<room>.py the __init__.py."""
    room, words = Path(test).parent, Path(test).stem.removeprefix("test_").split("_")
    home = ROOT / OTHERS[str(room)] if str(room) in OTHERS else SOURCE / room
    names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    files = [home / ("__init__.py" if name == room.name else f"{name}.py") for name in names]
    return next(filter(Path.is_file, files), None)


def test_a_unit_test_is_named_after_the_module_that_it_tests():
    unit = TESTS / "unit"
    tests = [str(path.relative_to(unit)) for path in unit.rglob("test_*.py") if path.parent != unit]
    assert len(tests) > 80 and [test for test in tests if module_under_test(test) is None] == []
    assert module_under_test("optim/test_optim.py") == SOURCE / "optim/__init__.py"
    assert module_under_test("plan/test_peak_of_pipelines.py") == SOURCE / "plan/peak.py"
    assert module_under_test("plan/test_of_peak.py") is None


def test_what_tests_share_lies_in_support():
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]


def nodes_of(scope: ast.AST, whole: bool = False) -> Iterator[ast.AST]:
    """The nodes of a module or function; those of functions in it only if `whole`."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if whole or not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield from nodes_of(node, whole)


def uses_of_train(tree: ast.Module) -> list[int]:
    """The lines of a test that have the module `shardbook.train` for more than a call of its `train` or `main`."""
    lines = []
    for scope in (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef)):
        names = set()
        for node in nodes_of(scope):
            if isinstance(node, ast.ImportFrom) and node.module == "shardbook":
                names |= {alias.asname or alias.name for alias in node.names if alias.name == "train"}
            elif isinstance(node, ast.Import):
                names |= {alias.asname or alias.name for alias in node.names if alias.name == "shardbook.train"}
        if not names:
            continue
        nodes = [node for node in nodes_of(scope, whole=True) if isinstance(node, ast.Attribute | ast.Name)]
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
        calls = {id(node.value) for node in attributes if node.attr in ("train", "main")}
        lines += [node.lineno for node in nodes if ast.unparse(node) in names and id(node) not in calls]
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return lines + [node.lineno for node in strings if re.fullmatch(r"shardbook\.train\.\w+", node.value)]


def test_no_test_patches_what_the_story_imported_by_name():
    """Else the loop could not change without its tests: planted.replace takes a function where it lives."""
    lines = {str(path.relative_to(TESTS)): uses_of_train(ast.parse(path.read_text())) for path in TESTS.rglob("*.py")}
    assert {name: numbers for name, numbers in lines.items() if numbers} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from shardbook import optim, train\ntrain.clip_gradients = optim.Console = None",
        "import shardbook.train as story\nmeter.Ledger, story.Console = Ledger, Console",
        "import shardbook.train\nshardbook.train.run_step = None",
        "def plant():\n    from shardbook import train\n    spied = {'apply_stage': train}",
        "def plant():\n    from shardbook import train\n    setattr(train, 'run_step', None)",
        "monkeypatch.setattr('shardbook.train.run_step', None)",
    ],
)
def test_a_test_that_patches_the_story_turns_it_red(line):
    assert uses_of_train(ast.parse(line)) != []


def test_a_launcher_imports_no_torch():
    """It checks a recipe and starts ranks, which import torch at the same time as it would have."""
    rooms = "cli, recipe, data.find, parallel.mesh, ranks.launch, ranks.machine"
    code = (
        f"import sys, {', '.join(f'shardbook.{room}' for room in rooms.split(', '))}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_below_the_set_up_no_module_takes_the_whole_recipe():
    """A module has its own section; only what lays a run out, and the plan of one, have all of them."""
    named = re.compile(r"from shardbook\.recipe(?:\.schema)? import [^\n]*\bRecipe\b")
    whole = {name for name, path in modules().items() if named.search(path.read_text())}
    above = {"run", "plan", "compare", "translate", "recipe", "train.py", "evaluate.py", "cli"}
    assert {name for name in whole if name.split("/")[0] not in above} == {"parallel/placement.py"}


PRIVATE = "comm/torch_private.py"
# not torch's: Python's own, its protocol of named tuples, transformers' name of a model's attention
NOT_TORCH = {"os._exit", "sys._current_frames", "_fields", "_attn_implementation", "_apply_gate"}
LOOK_UPS = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller", "import_module"}


def is_private(name: str) -> bool:
    return any(re.match(r"_(?!_)", word) for word in name.split("."))


def own_names(trees: list[ast.Module]) -> set[str]:
    """Functions, methods, and what they or their class set: what `self._x` may be that is not torch's."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def private_names(tree: ast.Module, own: set[str]) -> list[str]:
    """The private names of others that a file uses: attributes, imports, and what it looks up by name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of_self = ast.unparse(node.value) in ("self", "cls") and node.attr in own
            found += [] if of_self else [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if is_private(name)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOOK_UPS:
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            found += [word for word in words if is_private(word)]
    return [name for name in found if not {name, name.split(".")[-1]} & NOT_TORCH]


OWN = own_names(list(TREES.values()))


@pytest.mark.parametrize("relative", [name for name in TREES if name != PRIVATE])
def test_private_names_of_torch_have_one_home(relative):
    assert private_names(TREES[relative], OWN) == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses import FakeTensorMode",
        "from torch.distributed.distributed_c10d import _world",
        "import torch._dynamo.config",
        "from torch.testing._internal.distributed.fake_pg import FakeStore",
        "torch._foreach_mul_(tensors, 2)",
        "parameter._local_tensor",
        "getattr(state, '_fsdp_param_group', None)",
        "importlib.import_module('torch._functorch.config')",
        "class Ours(torch.optim.Optimizer):\n    def step(self):\n        self._init_group()",
    ],
)
def test_a_private_name_elsewhere_turns_it_red(line):
    assert private_names(ast.parse(line), OWN)


ONE_HOME = {
    r"-\(-": {"arithmetic.py"},
    r'\.partial"': {"paths.py"},
    r"width = 140": set(),
    r'name (?:[!=]=|in|not in) \(?"(?:adamw|lion|muon)': {"recipe/schema.py", "recipe/learning.py"},
}


@pytest.mark.parametrize("fact", ONE_HOME)
def test_a_small_fact_has_one_home(fact):
    assert {name for name, path in modules().items() if re.search(fact, path.read_text())} <= ONE_HOME[fact]


def test_lines_of_ranks_go_through_one_function():
    """Else they would be printed by each rank, and stand in what `eval --json` prints for a program."""
    rooms = {name: path.read_text() for name, path in modules().items() if name.startswith(("run/", "model/"))}
    assert [name for name, text in rooms.items() if re.search(r"(?<![.\w])print\((?!self)", text)] == []


TOOLS = {"plan", "compare", "translate", "cli", "evaluate.py", "data/preview.py"}


def test_rooms_stay_small():
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert lengths["train.py"] <= 180
    assert max(lengths.values()) <= 350, lengths
    tools = sum(count for name, count in lengths.items() if {name, name.split("/")[0]} & TOOLS)
    print(f"core {sum(lengths.values()) - tools:,} lines, tools {tools:,}")  # said, not bounded: hops are what costs
    assert not {"utils", "helpers", "manager", "base"} & {path.stem for path in modules().values()}
    train = ast.parse(modules()["train.py"].read_text())
    loops = [node for node in ast.walk(train) if isinstance(node, ast.While | ast.For)]
    assert [loop.end_lineno - loop.lineno + 1 <= 20 for loop in loops] == [True]
    story = next(node for node in train.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    assert story.end_lineno - story.lineno + 1 <= 80


ROLES = {
    "said",
    "own",
    "found",
    "made",
    "there",
    "here",
    "whole",
}  # of a word in a sentence, not of a thing in the field


def names_of_roles(tree: ast.Module) -> list[str]:
    """Variables and arguments that are named by their role in a sentence."""
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return [
        name for name in [*stored, *(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))] if name in ROLES
    ]


def test_names_say_what_a_thing_is():
    assert {name: roles for name, tree in TREES.items() if (roles := names_of_roles(tree))} == {}
    assert names_of_roles(ast.parse("def f(own):\n    said = own")) == ["said", "own"]


# How many files name a feature in code: an axis, a tier or a method should be a file and few calls. None may grow, and
# none is to have more than 20. (What reads other programs' configurations has their words, and is not counted.)
KNOWN_IN = {
    r"(^|_)tp(_|$)|^TP(_|$|Group)|tensor_parallel": 20,
    r"(^|_)cp(_|$)|^CP(_|$|Group)|context_parallel": 14,
    r"(^|_)pp(_|$)|^PP(_|$)|pipeline": 20,
    r"(^|_)ep(_|$)|^EP(_|$|Group)|is_experts?$|^OF_EXPERTS$|expert_(units|sizes)": 20,
    r"offload": 20,
    r"lora|adapter": 25,
    r"distill|teacher": 20,
    r"zeropp|quantize_(weights|gradients)|secondary": 12,
    r"nf4|4bit": 10,
}


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Every name in the code of a file, of modules that it imports too; no word of a docstring or a message."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield from name.split(".")


@pytest.mark.parametrize("words", KNOWN_IN)
def test_a_feature_is_known_in_few_files(words):
    files = [name for name, tree in TREES.items() if any(re.search(words, each) for each in identifiers(tree))]
    files = [name for name in files if not name.startswith("translate/")]
    assert len(files) <= KNOWN_IN[words], files


def walk_of_a_save() -> set[str]:
    """The story, and the files in which a save lists, cuts, copies, writes and publishes tensors."""
    rooms, walk, files = ("run/checkpoint/", "boxes.py"), {"train.py"}, ["run/checkpoint/save.py"]
    while files:
        walk.add(file := files.pop())
        files += [each for each in imported_files(file) - walk if each.startswith(rooms) and TREES[each].body[1:]]
    return walk


def test_a_save_walks_through_few_files():
    assert "run/checkpoint/save.py" in imported_files("train.py") and len(walk_of_a_save()) <= 6, walk_of_a_save()


def test_torchs_distributed_checkpoint_is_not_used():
    """A checkpoint's files, and who writes what of them, are our own."""
    assert [name for name, path in modules().items() if "torch.distributed.checkpoint" in path.read_text()] == []


PAGES = [
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def missing(page: Path) -> list[str]:
    """What a page links to, or names in backquotes as a path of this repository, and is not there."""
    text = page.read_text()
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    named = re.findall(r"`((?:src|tests|docs|launch|recipes)/[\w./-]+)`", text)
    places = [(page.parent / target, target) for target in links if target] + [(ROOT / name, name) for name in named]
    return [name for path, name in places if not path.exists()]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_pages_name_exist(page):
    assert missing(ROOT / page) == []


def test_a_page_that_names_what_is_gone_turns_it_red(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](gone.md) and `src/shardbook/gone.py`, [b](#here) and [c](https://example.com)")
    assert missing(page) == ["gone.md", "src/shardbook/gone.py"]


def test_the_picture_shows_every_room_on_its_floor():
    drawn = re.findall(
        r'y="(\d+)" font-weight="600" font-size="14">(\w+)[./]', (ROOT / "docs" / "floors.svg").read_text()
    )
    floors = [{name for at, name in drawn if at == height} for height in dict.fromkeys(at for at, _ in drawn)]
    assert floors == FLOORS and [int(at) for at, _ in drawn] == sorted(int(at) for at, _ in drawn)


@pytest.mark.parametrize("wing", sorted(path.parent.name for path in SOURCE.glob("*/__init__.py")))
def test_a_wing_says_what_it_is(wing):
    text = ast.get_docstring(ast.parse((SOURCE / wing / "__init__.py").read_text()))
    assert text and len(text.splitlines()) >= 2, wing
