"""Workers that do something else than they should, at the moment that the test needs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.jobs.processes.process import Workers

_START = """
import sys, types
if "hatch_epcontext.worker" in " ".join(sys.orig_argv):
    # The server itself would do what is altered when it rehearses it.
    rehearsal = types.ModuleType("hatch_epcontext.worker.rehearsal")
    rehearsal.rehearse = lambda folder: None
    sys.modules[rehearsal.__name__] = rehearsal
"""


def write_start_code(folder: Path, source: str) -> None:
    """Let each worker, and their server, run ``source`` when it starts with ``folder`` in PYTHONPATH."""
    text = _START + textwrap.indent(textwrap.dedent(source), "    ")
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")


def write_broken_qnn(folder: Path) -> str:
    """Put a package of QNN into ``folder`` whose library needs one that does not exist; returns its name.

    So it is on systems without ``libatomic.so.1``, which is in no package of PyPI.
    """
    spec = importlib.util.find_spec("onnxruntime_qnn")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    altered = folder / package.name
    altered.mkdir(parents=True)
    for file in package.iterdir():
        (altered / file.name).symlink_to(file)
    (folder / "onnxruntime_qnn.libs").symlink_to(package.with_name("onnxruntime_qnn.libs"))
    library = altered / "libQnnSystem.so"
    contents = library.read_bytes()
    assert b"libatomic.so.1" in contents
    library.unlink()
    library.write_bytes(contents.replace(b"libatomic.so.1", b"libabsent.so.1"))
    return "libabsent.so.1"


@contextlib.contextmanager
def workers_with(folder: Path, source: str) -> Iterator[Workers]:
    """Workers that run ``source`` when they start; ``folder`` gets the file with it."""
    write_start_code(folder, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), *sys.path)))
        with Workers(60) as started:
            yield started
