"""Workers that do something else than they should, at the moment that the test needs."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.ipc.process import Workers


def write_start_code(folder: Path, source: str) -> None:
    """Let each worker, and their server, run ``source`` when it starts with ``folder`` in PYTHONPATH."""
    condition = 'import sys\nif "hatch_epcontext.worker" in " ".join(sys.orig_argv):\n'
    text = condition + textwrap.indent(textwrap.dedent(source), "    ")
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def workers_with(folder: Path, source: str) -> Iterator[Workers]:
    """Workers that run ``source`` when they start; ``folder`` gets the file with it."""
    write_start_code(folder, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), *sys.path)))
        with Workers(60) as started:
            yield started
