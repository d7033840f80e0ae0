"""A job's result: files in a folder, and the record of what they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hatch_epcontext.fingerprint import file_sha256
from hatch_epcontext.protocol import Agreement, Context, Folding
from hatch_epcontext.providers import Product

GENERATOR = "hatch-epcontext"
"""What manifests and reports name as their maker, followed by the version."""


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and its hex sha256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Preparation:
    """How a model was prepared: by which library, the nodes before and after, and what failed first."""

    folding: Folding
    nodes_before: int
    nodes: int
    control_flow: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """Seconds; those of loading are None where they could not be measured, and ``unmeasured`` says why."""

    prepare: float
    compile: float
    load_source: float | None = None
    load_context: float | None = None
    unmeasured: str = ""


@dataclass(frozen=True)
class Record:
    """What a job made. ``preparations`` and ``contexts``: one for each of the job's models, in order;
    ``files``: by name in the artifact's folder; ``versions``: of what compiled it.
    """

    product: Product
    preparations: tuple[Preparation, ...]
    contexts: tuple[Context, ...]
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]
    times: Times


@dataclass(frozen=True)
class Proof:
    """How a context was validated.

    ``how``: ``"run"`` when it was loaded and run, ``"cpu"`` when an optimized graph was run on the CPU
    EP in place of its own, ``"alone"`` when the files of a context that shares weights were checked and
    the same model was run as it is compiled alone, ``"structure"`` when only its files were checked,
    ``"none"`` when validation was switched off. ``agreements`` is empty unless outputs were compared;
    ``why``: why it was not run as it will be.
    """

    how: str
    agreements: tuple[Agreement, ...] = ()
    why: str = ""

    @property
    def cosine(self) -> float | None:
        """The least of the outputs' cosine similarities, if any was to be told."""
        return min((a.cosine for a in self.agreements if a.cosine is not None), default=None)


@dataclass(frozen=True)
class Artifact:
    """A job's result on disk."""

    folder: Path
    record: Record

    @property
    def size(self) -> int:
        return sum(file.size for file in self.record.files.values())


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Every file below ``folder``, by its path there with forward slashes."""
    return {
        path.relative_to(folder).as_posix(): record_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def record_file(path: Path) -> FileRecord:
    """The record of the file at ``path``."""
    return FileRecord(path.stat().st_size, file_sha256(path))


def is_intact(folder: Path, files: Mapping[str, FileRecord]) -> bool:
    """Whether each file of ``files`` is below ``folder`` as it was recorded."""
    for name, recorded in files.items():
        path = folder / PurePosixPath(name)
        if not path.is_file() or record_file(path) != recorded:
            return False
    return True


def link_or_copy(source: str | Path, target: str | Path) -> str:
    """Give the file ``source`` a second place: by a hard link where the file system allows, or a copy.

    For places that nothing writes to; the signature is that of `shutil.copytree`'s ``copy_function``.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return str(target)
