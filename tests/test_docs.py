"""The README and the pages in docs/ agree with the package, and with each other."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hatch_epcontext
from hatch_epcontext.config.environ import PREFIX, VARIABLES
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import Kind
from hatch_epcontext.graph.rewrites import REWRITES, UNROLLS
from hatch_epcontext.graph.rewrites.precise import PRECISE
from hatch_epcontext.providers import PROVIDERS
from tests.config.test_json_schema import validate
from tests.conftest import REPOSITORY
from tests.language_models import make_folder

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
DOCS = REPOSITORY / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
CONFIGURATION = PAGES["configuration.md"]
OTHERS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "example_project/README.md",
)
TEXTS = {
    **{f"docs/{name}": text for name, text in PAGES.items()},
    **{name: (REPOSITORY / name).read_text(encoding="utf-8") for name in OTHERS},
}

MAX_WORDS = 800
"""The README has about this many words at most."""


def section(text: str, heading: str) -> str:
    """The part of ``text`` under ``heading``, up to the next heading."""
    _, found = text.split(f"{heading}\n", 1)
    return found.split("\n#", 1)[0]


def test_every_variable_is_documented() -> None:
    listed = section(CONFIGURATION, "## Environment variables")
    assert set(re.findall(rf"`{PREFIX}([A-Z_]+)[=`]", listed)) == set(VARIABLES)
    assert all(variable.doc for variable in VARIABLES.values())


def test_every_provider_is_documented_with_where_it_was_verified() -> None:
    for name, provider in PROVIDERS.items():
        assert f"`{name}`" in README
        row = rf"^\| \[`{name}`\].*\| {re.escape(provider.hardware)} \|$"
        assert re.search(row, PAGES["providers.md"], re.MULTILINE)


def test_every_rewrite_is_documented() -> None:
    page = PAGES["what-compiles.md"]
    for heading, names in (
        ("## Rewrites", [rewrite.name for rewrite in (*REWRITES, *UNROLLS)]),
        ("## Results that differ", [*PRECISE]),
    ):
        cells = re.findall(r"^\| (`.+?) \|", section(page, heading), re.MULTILINE)
        assert [name for cell in cells for name in re.findall(r"`(.+?)`", cell)] == names


def test_every_file_and_function_that_the_page_about_the_architecture_names_exists() -> None:
    page = PAGES["architecture.md"]
    picture = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert picture is not None
    package = REPOSITORY / "hatch_epcontext"
    names = re.findall(
        r"`([\w/]+\.py|[\w/]+/|[\w/]+\.md)(?::([\w.]+))?`", without_code_blocks(page)
    )
    room = Path()
    for line in picture[1].splitlines():
        # What is inside a folder is indented under its line.
        inside = room if line.startswith(" ") else Path()
        modules = [Path(name) for name in re.split(r"[ ,]+", line[:32].strip())]
        names += [
            (
                (inside / module).as_posix()
                + ("" if (package / inside / module).is_dir() else ".py"),
                "",
            )
            for module in modules
        ]
        room = inside if inside.parts else modules[-1]
    assert len(names) > 80
    for name, attribute in names:
        path = next((root / name for root in (package, REPOSITORY) if (root / name).exists()), None)
        assert path is not None, name
        if attribute:
            assert attribute in defined(ast.parse(path.read_text(encoding="utf-8"))), name


def without_code_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def defined(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """The names of the functions, classes, methods and constants that ``tree`` defines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
            yield from defined(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + t.id for t in targets if isinstance(t, ast.Name))


def test_every_id_of_a_problem_is_documented_under_its_own_anchor() -> None:
    page = PAGES["errors.md"]
    assert re.findall(r"^### (EPC\d+)$", page, re.MULTILINE) == [kind.id for kind in Kind]
    for kind in Kind:
        about = section(page, f"### {kind.id}").strip()
        # A title may say it all. What to do is never missing.
        assert re.fullmatch(r"\*\*[A-Z][^*]+\*\*(.*\.)?\n\n.+\.", about, re.DOTALL), kind.id


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """``docs/generate.py``, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_up_to_date(generate: ModuleType) -> None:
    for name in ("providers", "configuration", "api", "what-compiles"):
        assert PAGES[f"{name}.md"] == generate.PAGES[name](), "run: python docs/generate.py"


def test_the_page_about_commands_is_up_to_date(generate: ModuleType) -> None:
    # click breaks the lines, and its releases break them differently.
    expected = generate.commands().split()
    assert PAGES["commands.md"].split() == expected, "run: python docs/generate.py"


def test_every_example_is_a_valid_configuration(tmp_path: Path) -> None:
    loaded = 0
    for name, text in TEXTS.items():
        for block in re.findall(r"^```toml[^\n]*\n(.*?)```", text, re.DOTALL | re.MULTILINE):
            if (table := parse(block).get("tool", {}).get("epcontext")) is None:
                continue
            loaded += 1
            root = tmp_path / str(loaded)
            write_models(root, table)
            assert load(root, table, {}, {}).targets, f"{name}:\n{block}"
            validate(table)
    assert loaded >= 20


def write_models(root: Path, table: dict[str, Any]) -> None:
    """Write empty files in the places of the models and inputs of ``table``."""
    # What an example leaves out is added: a model for its targets, and a target for its models.
    table.setdefault("models", ["models/digits.onnx"])
    models = [{"path": model} if isinstance(model, str) else model for model in table["models"]]
    names = {name for model in models for name in model.get("targets", ())} or {"npu"}
    table.setdefault("targets", {name: {"provider": "qnn"} for name in names})
    for model in models:
        validate, targets = model.get("validate"), model.get("targets")
        changes = targets.values() if isinstance(targets, dict) else ()
        tables = [target for target in changes if isinstance(target, dict)]
        inputs = [target.get("quantize", {}).get("inputs") for target in tables]
        inputs.append(validate.get("inputs") if isinstance(validate, dict) else None)
        if "context-length" in model:
            own = [target["path"] for target in tables if "path" in target]
            for name in (model["path"], *own):
                make_folder(root / name, context_length=model["context-length"])
            continue
        for name in filter(None, (model.get("path"), *inputs)):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    if "validated-on" in table:
        (root / table["validated-on"]).mkdir()


def test_the_readme_has_examples() -> None:
    assert len(re.findall(r"```toml\n.*?\[tool\.epcontext\]", README, re.DOTALL)) >= 1


def without_code(text: str) -> str:
    """``text`` without blocks of code and without code in lines."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def links(text: str) -> list[str]:
    """The targets of all links."""
    return re.findall(r"\]\(([^)\s]+)\)", without_code(text))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def base() -> str:
    """The address of the repository's files, as ``[project.urls]`` has it."""
    urls = parse((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    source: str = urls["Source"]
    return f"{source}/blob/main/"


def targets_of(name: str) -> list[tuple[Path, str]]:
    """The files in the repository, and their anchors, that a page links to."""
    found = []
    for link in links(TEXTS[name]):
        path, _, anchor = link.partition("#")
        if link.startswith(base()):
            found.append((REPOSITORY / path.removeprefix(base()), anchor))
        elif "://" not in link:
            found.append(
                (REPOSITORY / name if not path else (REPOSITORY / name).parent / path, anchor)
            )
    return found


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    for name in TEXTS:
        for path, anchor in targets_of(name):
            assert path.exists(), f"{name}: {path}"
            if anchor:
                known = anchors(path.read_text(encoding="utf-8"))
                assert anchor in known, f"{name}: {path}#{anchor}"


def test_the_links_of_the_readme_work_on_an_index_too() -> None:
    # Indexes show the README without the repository.
    assert all("://" in link for link in links(README))
    assert len(targets_of("README.md")) >= 10


def test_every_page_is_reachable_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.parent != DOCS:
            continue
        reached.add(page)
        waiting += [path.resolve() for path, _ in targets_of(f"docs/{page.name}")]
    assert {page.name for page in reached} == set(PAGES)
    assert DOCS / "index.md" in {path for path, _ in targets_of("README.md")}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    # mkdocs, which is not installed with the tests, checks the rest when .ci/run builds the site.
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [^:\n]+: ([\w-]+\.md)$", text.split("\nnav:\n")[1], re.MULTILINE)
    assert set(PAGES) - set(listed) == set(), "add these pages under nav: in mkdocs.yml"
    assert sorted(listed) == sorted(PAGES)


def test_the_pages_link_to_files_outside_of_the_site_by_their_address() -> None:
    # A relative link works on GitHub only.
    for name in PAGES:
        assert [link for link in links(TEXTS[f"docs/{name}"]) if link.startswith("..")] == []


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS


@pytest.mark.parametrize("end", ["example_project", "pytest"])
def test_each_command_of_the_readme_is_one_line(end: str) -> None:
    # .ci/run finds them this way.
    assert len(re.findall(rf"^python3 -m venv .*{end}$", README, re.MULTILINE)) == 1


def test_the_version_stands_in_one_place() -> None:
    project = parse((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "hatch_epcontext/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", hatch_epcontext.__version__)
