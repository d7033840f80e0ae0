from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.build_hooks import hooks_of_project

WHEEL, EVERYWHERE = "tool.hatch.build.targets.wheel.hooks", "tool.hatch.build.hooks"


def tables(*names: str) -> str:
    return "".join(f"[{name}]\n" for name in names)


def write(root: Path, toml: str) -> Path:
    (root / "pyproject.toml").write_text('[project]\nname = "a"\nversion = "1"\n' + toml)
    return root


@pytest.mark.parametrize(
    ("toml", "before", "after"),
    [
        (tables(f"{WHEEL}.custom", f"{WHEEL}.epcontext"), ("custom",), ()),
        (tables(f"{WHEEL}.epcontext", f"{WHEEL}.custom"), (), ("custom",)),
        # Hooks for all targets run first, wherever they are written.
        (tables(f"{WHEEL}.custom", f"{EVERYWHERE}.epcontext"), (), ("custom",)),
        (tables(f"{WHEEL}.epcontext", f"{EVERYWHERE}.custom"), ("custom",), ()),
        # A table of both kinds has the place of the first one.
        (
            tables(f"{EVERYWHERE}.epcontext", f"{WHEEL}.custom", f"{WHEEL}.epcontext"),
            (),
            ("custom",),
        ),
        (tables(f"{EVERYWHERE}.vcs", f"{EVERYWHERE}.epcontext"), (), ()),
        (f"[{EVERYWHERE}.off]\nenable-by-default = false\n[{EVERYWHERE}.epcontext]\n", (), ()),
        ("tool = 3", (), ()),
    ],
)
def test_hooks_run_in_the_order_of_hatchling(
    tmp_path: Path, toml: str, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    found = hooks_of_project(write(tmp_path, toml))
    assert (found.before, found.after) == (before, after)
    assert bool(found) == bool(before or after)


def test_the_advice_names_the_hook_that_runs_too_late(tmp_path: Path) -> None:
    hooks = hooks_of_project(write(tmp_path, tables(f"{WHEEL}.custom", f"{EVERYWHERE}.epcontext")))
    assert "If a build hook makes it (custom), write the table of that hook above" in str(
        hooks.advice()
    )
