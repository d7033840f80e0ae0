"""What the server of forks does before it forks, in a process of its own as there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers")
def test_a_rehearsal_works_and_leaves_no_threads(tmp_path: Path) -> None:
    for name in ("rehearsal", "elsewhere"):
        (tmp_path / name).mkdir()
    script = textwrap.dedent(f"""
        import os
        import time
        from pathlib import Path
        from hatch_epcontext.worker.actions import check, compile, prepare, rewrite, validate
        from hatch_epcontext.worker.rehearsal import rehearse
        before = os.listdir("/proc/self/task")
        reply = rehearse(Path({str(tmp_path / "rehearsal")!r}))
        end = time.monotonic() + 10
        # The system lists a thread for a moment after it was joined.
        while os.listdir("/proc/self/task") != before and time.monotonic() < end:
            time.sleep(0.05)
        assert os.listdir("/proc/self/task") == before
        assert [each.status.name for each in reply.validation.agreements] == ["AGREES"]
        # The server's own working directory is the root of the file system.
        assert os.listdir() == []
        """)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path / "elsewhere")
