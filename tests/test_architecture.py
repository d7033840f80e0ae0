"""The rules that keep the house in order."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hatch_epcontext

PACKAGE = Path(hatch_epcontext.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"onnx", "onnxruntime", "numpy"}

# Rooms from left to right: none imports one that stands further right.
ORDER = [
    {"errors", "files", "providers", "pyproject"},
    {"structure"},
    {"environment", "options", "paths", "protocol", "fingerprint"},
    {"tables", "artifact"},
    {"targets", "schema"},
    {"checks"},
    {"config", "process", "cache"},
    {"requirements"},
    {"plan", "coverage", "scaffold"},
    {"proof", "preparation", "result"},
    {"job", "report"},
    {"page", "build"},
    {"manifest", "bench"},
    {"plot"},
    {"wheel"},
    {"tree", "inspection", "survey", "publish"},
    {"validation"},
    {"plugin", "cli"},
    {"hooks"},
]


def imported(module: Path) -> Iterator[str]:
    """The full names of all modules that ``module`` imports anywhere."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(module: Path) -> str:
    return module.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_only_workers_import_onnx_and_onnxruntime(module: Path) -> None:
    roots = {name.split(".")[0] for name in imported(module)}
    if module.parent.name == "worker":
        return
    # The loader is not run by a build: it is shipped.
    allowed = {"onnxruntime"} if module.name == "loader.py" else set()
    assert not roots & HEAVY - allowed


def test_the_loader_imports_the_standard_library_and_onnxruntime_alone() -> None:
    roots = {name.split(".")[0] for name in imported(PACKAGE / "loader.py")}
    assert roots <= {*sys.stdlib_module_names, "onnxruntime"}


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_nothing_on_the_left_imports_what_is_on_its_right(module: Path) -> None:
    room = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room in ("worker", "loader", "__init__"):
        return
    rank = {name: index for index, names in enumerate(ORDER) for name in names}
    assert room in rank, f"{room} has no place in the order of rooms"
    for name in imported(module):
        parts = name.split(".")
        if parts[0] == "hatch_epcontext" and len(parts) > 1 and parts[1] in rank:
            assert rank[parts[1]] < rank[room] or parts[1] == room, f"{room} imports {name}"


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_hatchs_entry_point_brings_nothing_of_the_package_and_none_of_its_dependencies() -> None:
    loaded = loaded_after("import hatch_epcontext.hooks") - loaded_after("import hatchling.plugin")
    assert {name for name in loaded if name.startswith("hatch_epcontext")} == {
        "hatch_epcontext",
        "hatch_epcontext.hooks",
    }
    assert not {"cattrs", "packaging", "platformdirs"} & loaded


def test_the_hook_itself_brings_the_core_only_when_it_is_used() -> None:
    loaded = loaded_after("from hatch_epcontext.hooks import hatch_register_build_hook as h; h()")
    assert "hatch_epcontext.config" not in loaded


def test_the_hook_needs_nothing_of_the_command_line() -> None:
    assert not loaded_after("import hatch_epcontext.plugin, hatch_epcontext.build") & {
        "click",
        "rich",
        "tomlkit",
    }


def test_the_whole_core_brings_neither_onnx_nor_onnxruntime() -> None:
    core = "import hatch_epcontext.plugin, hatch_epcontext.tree"
    assert not loaded_after(core) & HEAVY
