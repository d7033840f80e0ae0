"""The Python modules that are shipped beside the models."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath, PurePosixPath

import hatch_epcontext
from hatch_epcontext.config.settings import Model

_PYINSTALLER = "__pyinstaller"
"""The folder of the hook for PyInstaller; no model has such a name."""


def loader_file() -> Path:
    """The module that is shipped next to the manifest, as ``__init__.py``."""
    return Path(hatch_epcontext.__file__).with_name("loader.py")


def modules(import_name: str | None, models: Collection[Model]) -> Mapping[str, Path]:
    """The modules of a package, by their path in it: the loader, and what the models need beside it.

    With ``import_name``, the package's name, also the hook for PyInstaller, which finds it by that name.
    """
    shipped = {"__init__.py": loader_file()}
    if any(target.settings.recompile for model in models for target in model.targets):
        shipped["_recompile.py"] = loader_file().with_name("_recompile.py")
    if import_name is not None:
        folder = Path(__file__).with_name("pyinstaller")
        shipped[f"{_PYINSTALLER}/__init__.py"] = folder / "__init__.py"
        shipped[f"{_PYINSTALLER}/hook-{import_name}.py"] = folder / "hook.py"
    return shipped


def import_name(path: PurePath) -> str | None:
    """The name by which Python imports the folder at ``path`` in a wheel; None if it cannot."""
    is_importable = all(part.isidentifier() and not keyword.iskeyword(part) for part in path.parts)
    return ".".join(path.parts) if path.parts and is_importable else None


def import_name_in_tree(folder: Path) -> str | None:
    """The name by which Python imports ``folder`` of a source tree.

    Its parents are packages as far as they have an ``__init__.py``. None if the nearest has none: such a
    folder is on no path of Python's, but somewhere on a disk.
    """
    parts = [folder.name]
    for parent in folder.parents:
        if not (parent / "__init__.py").is_file():
            break
        parts.insert(0, parent.name)
    return import_name(PurePosixPath(*parts)) if len(parts) > 1 else None


def bytecode(folder: Path) -> list[Path]:
    """What Python has compiled of the modules in ``folder``."""
    return [
        path
        for place in (folder, folder / _PYINSTALLER)
        for path in place.glob("__pycache__/*.pyc")
    ]
