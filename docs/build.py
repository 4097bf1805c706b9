"""Makes the pages of docs/reference/ from the code, and the site from all pages.

    python docs/build.py reference     write docs/reference/*.md
    python docs/build.py matrix        write the table of docs/matrix.md
    python docs/build.py site          write site/, with Zensical

Invariant: a page of docs/reference/ is what `pages()` returns; a test compares them. A link that works in the
repository works in the site, where each file of the repository that a page links to is a page too.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "site" / "html"
STAGED = ROOT / "site" / ".pages"  # what Zensical reads
MADE = "<!-- Made by `make reference`; a test says when it is old. -->\n\n"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")

# Files of the repository that are no text of a page: they go as they are.
ASSETS = {".svg", ".png", ".html", ".json", ".jsonl", ".ipynb", ".css", ".js"}


def pages() -> dict[str, str]:
    """Returns the text of each page of docs/reference/ by its name."""
    made = {"keys": write_keys(), "recipes": write_recipes(), "commands": write_commands()}
    made |= {"metrics": write_metrics(), "exit-codes": write_exit_codes()}
    return {f"{name}.md": f"{MADE}{text.strip()}\n" for name, text in made.items()}


def write_keys() -> str:
    """Returns the key reference: type, default, limits, help, other programs' words, recipes, and contradictions."""
    from shardbook.recipe import Recipe
    from shardbook.recipe.refusals import RULES
    from shardbook.recipe.stages import ALIASES, STAGES

    words = tomllib.loads((ROOT / "src/shardbook/recipe/words.toml").read_text())
    given = {path.stem: flat(tomllib.loads(path.read_text())) for path in sorted((ROOT / "recipes").glob("*.toml"))}
    schema = Recipe.model_json_schema(by_alias=False)
    lines = ["# Every key of a recipe", ""]
    lines += [
        "A key is set in a recipe's file, or behind the command as `section.key=value`, where the last of several",
        "values counts. A key that is not there is an error, which offers the nearest one.",
        "[What goes with what](../matrix.md) shows the pairs that are refused.",
        "",
    ]
    sections: dict[str, dict[str, Any]] = {"": {"method": schema["properties"]["method"]}}
    for name, place in schema["properties"].items():
        if "$ref" in place or "allOf" in place:
            reference = place.get("$ref") or place["allOf"][0]["$ref"]
            sections[name] = schema["$defs"][reference.rpartition("/")[2]]["properties"]
    for section, keys in sections.items():
        lines += [f"## [{section}]" if section else "## Outside of any section", ""]
        for name, facts in keys.items():
            key = f"{section}.{name}".lstrip(".")
            lines += [f"### {key}", "", facts.get("description", ""), ""]
            stages = {"enum": [*STAGES, *ALIASES]}  # a text to the schema, which imports no table of stages
            lines += [f"- **Values:** {describe_type(stages if key == 'parallel.stage' else facts)}"]
            default = "must be given" if "default" not in facts else f"`{show(facts['default'])}`"
            lines += [f"- **Default:** {default}"]
            if others := [
                word for known, each in words.items() if known.split(" ")[0].rstrip(",") == key for word in each
            ]:
                lines += [f"- **Elsewhere called:** {', '.join(f'`{word}`' for word in others)}"]
            if users := [recipe for recipe, keys_of in given.items() if key in keys_of]:
                shown = [f"[{recipe}](recipes.md#{recipe.replace('.', '')})" for recipe in users[:6]]
                more = f", and {len(users) - 6} more" if len(users) > 6 else ""
                lines += [f"- **Set by:** {', '.join(shown)}{more}"]
            lines += [f"- **Does not go with:** {text}" for text in sorted({*contradictions(key, RULES)})]
            lines += [""]
    return "\n".join(lines)


def contradictions(key: str, rules: Any) -> list[str]:
    """Returns what the table of rules says of `key`: beside which other keys, under which further ones, and why; one
    line for each reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for rule in rules:
        for mine, theirs in ((rule.keys, rule.others), (rule.others, rule.keys)):
            for text in mine.split(" ") * bool(theirs):
                name, _, value = text.partition("=")
                if name.rstrip("!") == key:
                    known = {key, *(other.partition("=")[0].rstrip("!") for other in theirs.split(" "))}
                    needs = [each for each in rule.given.split() if each.partition("=")[0].rstrip("!") not in known]
                    conditions = [] if name.endswith("!") else [f"where it is {listed(value)}"]
                    conditions += [f"with {' and '.join(map(pattern, needs))}"] if needs else []
                    where = f" ({', '.join(conditions)})" if conditions else ""
                    found.setdefault((where, plain(rule.why)), []).extend(theirs.split(" "))
    return [f"{', '.join(dict.fromkeys(map(pattern, theirs)))}{where}: {why}" for (where, why), theirs in found.items()]


def pattern(text: str) -> str:
    """Returns a pattern of the table of rules in words."""
    name, _, value = text.partition("=")
    if name.endswith("!"):
        return f"`{name[:-1]}`" + (f" other than {listed(value)}" if value not in ("", "[]") else "")
    return f"`{name} = {value}`" if "|" not in value else f"`{name}` of {listed(value)}"


def listed(values: str) -> str:
    return " or ".join(f"`{value}`" for value in values.split("|"))


def plain(why: str) -> str:
    """Returns a rule's reason with the fields in braces as words."""
    return re.sub(r"\{([^}]*)\}", lambda field: f"the {field[1].split('.')[-2].replace('_', ' ')}", why)


def describe_type(facts: dict[str, Any]) -> str:
    """Returns the values that a property of a JSON schema allows, in words."""
    if "anyOf" in facts:
        return " or ".join(describe_type(each) for each in facts["anyOf"])
    if "enum" in facts:
        return ", ".join(f"`{show(value)}`" for value in facts["enum"])
    if "const" in facts:
        return f"`{show(facts['const'])}`"
    kinds = {"string": "text", "integer": "a whole number", "number": "a number", "boolean": "`true` or `false`"}
    kind = kinds.get(facts.get("type", ""), "a table")
    if facts.get("type") == "array":
        inside = facts.get("items") or (facts.get("prefixItems") or [{}])[0]
        kind = f"a list of {describe_type(inside).removeprefix('a ')}"
    bounds = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
    }
    said = [words.format(show(facts[name])) for name, words in bounds.items() if name in facts]
    if pattern := facts.get("pattern"):
        from shardbook.recipe.sections import FORMS

        said += (
            [f"one of {', '.join(f'`{form}`' for form in FORMS[pattern])}"]
            if pattern in FORMS
            else [f"like `{pattern}`"]
        )
    return ", ".join([kind, *said])


def show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else '""' if value == "" else f"{value}"


def flat(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe's keys as section.key."""
    found = {key: value for key, value in given.items() if not isinstance(value, dict)}
    inside = {section: keys for section, keys in given.items() if isinstance(keys, dict)}
    return found | {f"{section}.{key}": value for section, keys in inside.items() for key, value in keys.items()}


def write_recipes() -> str:
    """Returns the catalogue: what each shipped recipe is, its hardware, memory and command, from its own header."""
    lines = [
        "# The recipes",
        "",
        "Each file says what it does, on what, and what was predicted and measured. `make plan RECIPE=name` computes",
    ]
    lines += ["the memory and time of one on any cluster. Those of smollm2 run anywhere, without a download.", ""]
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        text = path.read_text()
        header = [line[2:] for line in text.split("\n[")[0].split("\n") if line.startswith("# ")]
        title, facts = header[0], [line for line in header[1:] if ":" in line.split(" ")[0]]
        lines += [f"## {path.stem}", "", title, ""]
        lines += [f"- **{fact.partition(':')[0]}:** {code(*fact.partition(':')[::2])}" for fact in facts]
        lines += [f"- **file:** [recipes/{path.name}](../../recipes/{path.name})", ""]
    return "\n".join(lines)


def code(name: str, value: str) -> str:
    return f"`{value.strip()}`" if name == "run" else value.strip()


def write_commands() -> str:
    """Returns what each command says of itself."""
    lines = [
        "# The commands",
        "",
        "`shardbook` is in `.venv/bin` of a checkout. Each command ends with one of the [exit codes](exit-codes.md).",
        "",
    ]
    for command in ["", *re.findall(r"\w+", help_of("").partition("{")[2].partition("}")[0])]:
        said = help_of(command).partition("keys of a recipe:")[0].rstrip()
        lines += [f"## shardbook {command}".rstrip(), "", "```text", said, "```", ""]
    lines += [
        "The keys that `shardbook train --help` lists are on [a page of their own](keys.md).",
        "",
        "## make",
        "",
        "```text",
    ]
    targets = re.findall(r"^([a-z-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(), re.M)
    lines += [f"make {target:<18}{said}" for target, said in targets] + ["```"]
    return "\n".join(lines)


def help_of(command: str) -> str:
    from shardbook.cli import main

    said, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "110"
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*filter(None, [command]), "--help"])
    os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return said.getvalue()


def write_metrics() -> str:
    """Returns every metric with its unit, its meaning and where it is made."""
    lines = [
        "# The metrics",
        "",
        "Each row of `metrics.jsonl` is one step, and so is each step of a tracker. A metric that was not measured is",
        "absent, never zero. `<op>` is a collective (`all_gather`, `reduce_scatter`, ...), `<axis>` an axis of the",
        "mesh.",
        "",
    ]
    for group, rows in tomllib.loads((DOCS / "metrics.toml").read_text()).items():
        lines += [f"## {group}", "", "| metric | unit | what it is | made in |", "|---|---|---|---|"]
        for name, (unit, meaning, file) in rows.items():
            lines += [f"| `{name}` | {unit} | {meaning} | [{file}](../../src/shardbook/{file}) |"]
        lines += [""]
    return "\n".join(lines)


def write_exit_codes() -> str:
    """Returns the exit codes, and what to do after each."""
    from shardbook.ranks.exits import DONE, EXIT_FILE, FAILED, PREEMPTED, WRONG

    stopped = "SIGTERM, SIGINT or SIGUSR1 came, and the run saved its step (after a second SIGTERM it did not)."
    return f"""# Exit codes

| code | name | what it means, and what to do |
|---|---|---|
| {DONE} | done | The last step is done, and its results are written. |
| {FAILED} | failed | A rank, the machine or a disk failed. The last line says why. Run the same command again. |
| {WRONG} | wrong | The last line names the key, the file or the argument that is wrong, and what is allowed. |
| {PREEMPTED} | preempted | {stopped} Run the same command again. |

After 1 and 75 the same command continues from the newest checkpoint; after 2 it would say the same again.

`torchrun` and `accelerate launch` turn every code into 1. Where the variable `{EXIT_FILE}` names a file, each
rank appends its own code to it, and a script around them can end with the first line."""


def stage(pages_of: Path = DOCS) -> list[str]:
    """Copies the pages to STAGED, and a page for each file that one links to. Returns the links to nothing."""
    shutil.rmtree(STAGED, ignore_errors=True)
    missing: list[str] = []
    sources: set[Path] = set()
    for path in sorted(pages_of.rglob("*")):
        target = STAGED / path.relative_to(pages_of)
        if path.suffix == ".md":
            write(target, LINK.sub(lambda link, page=path: relink(link, page, sources, missing), path.read_text()))
        elif path.is_file() and path.suffix in ASSETS:
            write(target, path.read_bytes())
        if path.suffix == ".ipynb":
            text = LINK.sub(lambda link, page=path: relink(link, page, sources, missing), write_notebook(path))
            write(target.with_suffix(".md"), text)
    for source in sources:
        kind = source.suffix.lstrip(".").replace("toml", "toml") or "text"
        name = source.relative_to(ROOT)
        text = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n````{kind}\n{source.read_text()}\n````\n"
        write(STAGED / "files" / f"{name}.md", text)
    return missing


def relink(link: re.Match[str], page: Path, sources: set[Path], missing: list[str]) -> str:
    """Returns a link of `page` as it stands in the site; notes files that it needs, and files that are not there."""
    before, target, after = link.groups()
    path = target.partition("#")[0]
    if not path or "://" in target or target.startswith("mailto:"):
        return link[0]
    there = (page.parent / path).resolve()
    if not there.exists():
        missing.append(f"{page.relative_to(ROOT)}: {target}")
        return link[0]
    if there.is_relative_to(DOCS):
        return link[0] if page.suffix == ".ipynb" else link[0].replace(".ipynb)", ".md)")
    if there == ROOT / "README.md":
        there = DOCS / "index.md"
        return f"{before}{os.path.relpath(there, page.parent)}{after}"
    if there.is_dir():
        there = there / "__init__.py" if (there / "__init__.py").exists() else ROOT / "AGENTS.md"
    sources.add(there)
    place = DOCS / "files" / f"{there.relative_to(ROOT)}.md"
    return f"{before}{os.path.relpath(place, page.parent)}{after}"


def write_notebook(path: Path) -> str:
    """Returns a notebook as a page: its text, its code, and what the code printed."""
    lines = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        said = "".join("".join(each.get("text", "")) for each in cell["outputs"]).rstrip()
        lines += ["```python", source, "```", "", *(["```text", said, "```", ""] if said else [])]
    return "\n".join([*lines, f"This page is a notebook: [{path.name}]({path.name})."])


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def write_llms() -> None:
    """Writes llms.txt, a list of all pages with a sentence of each, and each page's Markdown beside it."""
    lines = ["# Shardbook", "", "> FSDP2/DTensor-native fine-tuning recipes for large language models.", ""]
    for path in sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]):
        name = path.relative_to(DOCS).with_suffix(".md")
        text = write_notebook(path) if path.suffix == ".ipynb" else path.read_text()
        write(SITE / name, text)
        title = next((line[2:] for line in text.split("\n") if line.startswith("# ")), str(name))
        lines.append(f"- [{title}]({name})")
    write(SITE / "llms.txt", "\n".join(lines) + "\n")


def build_site() -> int:
    """Builds site/. Returns 1 where a link leads nowhere or Zensical finds a fault."""
    if missing := stage():
        print("docs: these links lead nowhere:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    command = [
        str(Path(sys.executable).with_name("zensical")),
        "build",
        "--strict",
        "--clean",
        "-f",
        str(ROOT / "zensical.toml"),
    ]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True)
    if done.returncode:
        print(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr), file=sys.stderr)
        return 1
    write_llms()
    print(f"site: {SITE}/index.html, {sum(1 for _ in SITE.rglob('index.html'))} pages")
    return 0


def main(words: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "src"))  # the code beside these pages, whatever is installed
    match words:
        case ["reference"]:
            for name, text in pages().items():
                write(DOCS / "reference" / name, text)
            return 0
        case ["matrix"]:
            from matrix import write_matrix  # the file beside this one

            before, _, rest = (DOCS / "matrix.md").read_text().partition("```text\n")
            write(DOCS / "matrix.md", f"{before}```text\n{write_matrix()}\n```{rest.partition('```')[2]}")
            return 0
        case ["site"]:
            return build_site()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
