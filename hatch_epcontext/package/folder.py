"""A model package in a folder of the user: an exported one, or that of an editable install in the project.

An editable install puts the project on Python's path, which hides a package with the same name in
``site-packages``. So the package is written into the app's own package.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from hatch_epcontext.errors import ConfigError, Key, Kind, OutputError, Problem, Setting
from hatch_epcontext.files import is_intact, replace_files, sweep
from hatch_epcontext.package.bundle import Bundle
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.package.reader import own_files
from hatch_epcontext.package.wheel import OUTPUT, Tree
from hatch_epcontext.text import listing

_MAX_NAMED = 5
"""The most files that a message names."""


def project_folder(output: PurePosixPath, tree: Tree) -> Path:
    """The folder of ``output`` in the project; raises ConfigError if no package contains it."""
    for path, source in tree.items():
        parent = PurePosixPath(path).parent
        if parent.parts and output.is_relative_to(parent):
            return source.parent / output.relative_to(parent)
    raise ConfigError(
        Problem.at(
            OUTPUT,
            Kind.NO_OUTPUT_PACKAGE,
            f'an editable install cannot write to "{output}": no package of the project contains it.',
            "Name a folder in one of the project's packages, or skip the models in editable installs.",
            Setting(OUTPUT),
            Setting(Key() / "editable", "skip"),
        )
    )


def owned_paths(output: PurePosixPath, folder: Path) -> frozenset[str]:
    """The files in ``folder`` that an editable install wrote, as paths in the wheel."""
    files = own_files(folder)
    names = () if files is None else (*files, FILE)
    return frozenset(str(output / name) for name in names)


def refuse_others(folder: Path, *, edited: bool) -> None:
    """Raise OutputError if ``folder`` has files that its manifest does not name, or is no package.

    With ``edited`` also if a file is not as the manifest says: git ignores the folder of an editable install,
    and could not restore it.
    """
    sweep(folder)
    recorded = own_files(folder)
    ours = {} if recorded is None else recorded
    others = [
        name
        for name in _files(folder)
        # Python writes bytecode when it imports the loader.
        if "__pycache__" not in PurePosixPath(name).parts
        and (name != FILE or recorded is None)
        and (name not in ours or (edited and not is_intact(folder, {name: ours[name]})))
    ]
    if others:
        message = (
            f"the folder has files that this tool did not write: {listing(others, _MAX_NAMED)}."
        )
        hint = "Choose another folder, or move them away: they are never overwritten."
        raise OutputError(Problem(Kind.FILE_EXISTS, str(folder), message, hint))


def publish(bundle: Bundle, folder: Path, *, edited: bool) -> None:
    """Make ``folder`` the package of ``bundle`` as a whole, or leave it as it is.

    Raises as `refuse_others`; OSError; and ModelError if a source has changed.
    """
    refuse_others(folder, edited=edited)
    # Real copies: the bundle only links files of the cache and of the project.
    files = {name: bundle.folder / name for name in bundle.files}
    replace_files(folder, files, _files(folder), bundle.check_sources)


def _files(folder: Path) -> list[str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    return [path.relative_to(folder).as_posix() for path in paths]
