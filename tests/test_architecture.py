"""The rules about imports; `docs/architecture.md` explains them."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hatch_epcontext
from tests.conftest import printed_json

PACKAGE = Path(hatch_epcontext.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"onnx", "onnxruntime", "numpy"}

LAYERS = [
    {
        "errors",
        "files",
        "frozen",
        "_check",
        "_genai",
        "_recompile",
        "_runner",
        "_user_cache",
        "loader",
        "recorder",
        "serialize",
        "shipped",
        "system",
        "text",
    },
    {"graph"},
    {"providers"},
    {"config"},
    {"worker"},
    {"cache"},
    {"remote"},
    {"jobs"},
    {"package"},
    {"tools"},
    {"project_build"},
    {"api", "backend", "cli", "hatch_build", "plugin"},
    {"hooks"},
]
"""The folders and modules of the package by layer, the lowest first."""

BORDER = {
    "worker": {"protocol", "requests", "results"},
    "graph": {"facts", "number_format", "operators"},
}
"""The modules of ``worker`` and ``graph`` that others import: what crosses the border of the processes.

They import no other ones of ``worker`` and ``graph``, not even in functions: nothing there needs onnx.
"""

COMPARED = ("ort_values", "samples", "synthetic")
"""The modules of ``worker`` that make and hold what a comparison compares, and know as little."""

COMPARISON = {
    "frozen",
    "graph",
    "providers",
    *(f"worker.{name}" for name in ("comparison", "results", "session", *COMPARED)),
}
"""What a comparison imports: graphs, limits, what runs samples; no configuration, problems or progress."""

RULE = (
    "Data goes one way: pyproject -> Config -> Plan -> artifacts -> model package -> wheel. A part "
    "imports only parts of its own layer or below, so that a reader can understand the lower parts "
    "without the upper ones. Move the code down, or pass what it needs as a parameter."
)


@functools.cache
def imported(module: Path) -> frozenset[str]:
    """The full names of all modules that ``module`` imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def imported_at_once(module: Path) -> Iterator[str]:
    """The full names of the modules that ``module`` imports outside of functions."""
    nodes: list[ast.AST] = [ast.parse(module.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)


def parts_imported(module: Path) -> set[str]:
    """The parts of the package that ``module`` imports."""
    parts = (name.split(".") for name in imported(module))
    return {each[1] for each in parts if each[0] == "hatch_epcontext" and len(each) > 1}


def name_of(module: Path) -> str:
    return module.relative_to(PACKAGE).as_posix()


def part_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_parts_import_only_their_own_layer_and_lower_ones() -> None:
    layer = {part: index for index, parts in enumerate(LAYERS) for part in parts}
    parts = {part_of(module) for module in MODULES} - {"__init__"}
    assert parts <= layer.keys(), f"{parts - layer.keys()} have no layer. {RULE}"
    above = {
        name_of(module): others
        for module in MODULES
        if part_of(module) != "__init__"
        and (
            others := {
                o for o in parts_imported(module) if layer.get(o, 0) > layer[part_of(module)]
            }
        )
    }
    assert not above, f"{above}. {RULE}"


def test_workers_are_started_and_never_imported() -> None:
    inner: dict[str, set[tuple[str, ...]]] = {}
    for module in MODULES:
        part = part_of(module)
        if part in BORDER and module.stem not in BORDER[part]:
            continue
        names = {tuple(name.split(".")[1:3]) for name in imported(module) if name.count(".") > 1}
        others = {each for each in names if each[0] in BORDER and each[1] not in BORDER[each[0]]}
        if others:
            inner[name_of(module)] = others
    assert not inner, (
        f"{inner}. "
        "A vendor's compiler may crash or hang: what workers do happens in their own processes. "
        "Send a request through jobs.processes."
    )


def test_a_comparison_knows_arrays_and_limits_and_no_configuration() -> None:
    worker = PACKAGE / "worker"
    modules = (worker / f"{name}.py" for name in COMPARED)
    outside = {
        name_of(module): others
        for module in (*(worker / "comparison").glob("*.py"), *modules)
        if (others := {name for name in imported(module) if not _may_be_compared_with(name)})
    }
    assert not outside, f"{outside}. Actions take from a Model what is compared, and write advice."


def _may_be_compared_with(name: str) -> bool:
    _, *parts = name.split(".")
    is_own = name.startswith("hatch_epcontext.")
    return not is_own or bool({parts[0], ".".join(parts[:2])} & COMPARISON)


def test_no_modules_import_each_other() -> None:
    names = {".".join(("hatch_epcontext", *_parts(module))): module for module in MODULES}
    graph = {
        name: {each for each in imported(path) if each in names} for name, path in names.items()
    }
    while leaves := {name for name, needed in graph.items() if not needed & graph.keys()}:
        graph = {name: needed for name, needed in graph.items() if name not in leaves}
    assert not graph, f"these modules import each other: {sorted(graph)}"


def test_no_module_imports_a_private_name_of_another_one() -> None:
    private: dict[str, set[str]] = {}
    for module in MODULES:
        folder = ".".join(("hatch_epcontext", *module.parent.relative_to(PACKAGE).parts))
        # The modules of a folder share its private ones.
        names = {name.removeprefix(f"{folder}._") for name in imported(module)}
        if others := {name for name in names if re.match(r"hatch_epcontext\..*\b_(?!_)", name)}:
            private[name_of(module)] = others
    assert not private, f"{private}. Make it public, or move it to where it is needed."


def _parts(module: Path) -> tuple[str, ...]:
    return tuple(part for part in module.relative_to(PACKAGE).with_suffix("").parts)


def test_only_workers_import_onnxruntime_and_they_and_graph_onnx() -> None:
    refused: dict[str, set[str]] = {}
    for module in MODULES:
        allowed: set[str] = set()
        if part_of(module) == "worker":
            continue
        if part_of(module) == "graph":
            allowed = HEAVY - {"onnxruntime"}
            assert parts_imported(module) <= {
                "errors",
                "files",
                "frozen",
                "graph",
                "text",
            }, name_of(module)
        # They run in apps, and not in a build. onnxruntime brings numpy along.
        elif module.stem in {"_runner", "loader", "recorder"}:
            allowed = {"onnxruntime", "numpy"}
        roots = {name.split(".")[0] for name in imported(module)}
        if found := roots & HEAVY - allowed:
            refused[name_of(module)] = found
    assert not refused


@pytest.mark.parametrize(
    "name", ["loader", "_check", "_genai", "_recompile", "_runner", "_user_cache", "recorder"]
)
def test_what_runs_in_apps_imports_only_the_standard_library_and_onnxruntime(name: str) -> None:
    shipped = PACKAGE / f"{name}.py"
    roots = {each.split(".")[0] for each in imported(shipped)}
    # Types of the loader, which are not imported where it is shipped.
    roots -= {"hatch_epcontext"} if name[0] == "_" else set()
    assert roots <= {*sys.stdlib_module_names, "onnxruntime", "numpy"}
    at_once = {each.split(".")[0] for each in imported_at_once(shipped)}
    assert "numpy" not in at_once, "importing it must be fast: import numpy in a function"


def test_nothing_imports_the_loader() -> None:
    importing = {name_of(m) for m in MODULES if "hatch_epcontext.loader" in imported(m)}
    # It imports types of the loader, beside which it is shipped.
    assert importing == {
        "_check.py",
        "_genai.py",
        "_recompile.py",
        "_runner.py",
        "_user_cache.py",
    }, "put into `shipped` what both need"


def test_the_tests_mirror_the_folders() -> None:
    parts = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    mirrored = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir()}
    assert parts <= mirrored
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {
        "__init__",
        "hatch_build",
        "hooks",
        "project_build",
    }
    # Tests of the shipped module have a folder, with those of its other half.
    tests = (*Path(__file__).parent.glob("*.py"), *Path(__file__).parent.glob("loader/*.py"))
    tested = mirrored | {path.stem.removeprefix("test_") for path in tests}
    assert {module.removeprefix("_") for module in modules} <= tested


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    skipped = pytestconfig.getini("norecursedirs")
    # By default pytest leaves out every folder called "build", for example.
    assert not {name for folder in folders for name in folder.parts if _matches(name, skipped)}


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(printed_json(done.stdout))


def test_hatchs_entry_point_loads_nothing_of_the_package_and_its_dependencies() -> None:
    loaded = loaded_after("import hatch_epcontext.hooks") - loaded_after("import hatchling.plugin")
    assert {name for name in loaded if name.startswith("hatch_epcontext")} == {
        "hatch_epcontext",
        "hatch_epcontext.hooks",
    }
    assert not {"packaging", "platformdirs"} & loaded


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (
            "from hatch_epcontext.hooks import hatch_register_build_hook as hook; hook()",
            {"hatch_epcontext.config"},
        ),
        (
            "import hatch_epcontext.plugin, hatch_epcontext.jobs.run, hatch_epcontext.package.folder",
            HEAVY
            | {"click", "tomlkit"}
            | {"hatch_epcontext.cache.shared", "hatch_epcontext.remote.downloads"},
        ),
        ("import hatch_epcontext.cache.shared", {"fsspec", "s3fs", "aiohttp"}),
    ],
)
def test_what_is_needed_later_or_never_is_not_loaded(code: str, unwanted: set[str]) -> None:
    assert not loaded_after(code) & unwanted
