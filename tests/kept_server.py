"""One server that forks the workers of all tests of a process: starting one for each takes half of the time.

It is the real one, and so are its workers. It only ends later: after all tests, or after those that set the
variables which its workers inherit.
"""

from __future__ import annotations

import threading
from pathlib import Path

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.jobs.processes.running import Fork, ForkServer, worker_environment

Variables = frozenset[tuple[str, str]]
"""Names of environment variables with their values."""

_OF_TESTS = (PREFIX, "AWS_", "COLUMNS", "HATCH_BUILD", "HF_", "NO_PROXY", "PYTEST_CURRENT_TEST")


class _KeptServer(ForkServer):
    """A server that is still there when a build has ended."""

    def close(self) -> None:
        """Leave it to the next build."""

    def end(self) -> None:
        """End it, and all its workers."""
        if self.is_stuck:
            self._process.kill()
        super().close()

    @property
    def is_usable(self) -> bool:
        return not self.is_stuck and self._process.poll() is None


class KeptServers:
    """The servers by the variables that their workers inherit."""

    def __init__(self) -> None:
        # Tests run builds in several threads.
        self._lock = threading.Lock()
        self._servers: dict[tuple[Variables, tuple[str, ...]], _KeptServer] = {}

    def get(self, providers: tuple[str, ...] = ()) -> ForkServer:
        """The server for the variables of this moment and ``providers``, started if there is none."""
        key = (inherited(), providers)
        with self._lock:
            server = self._servers.get(key)
            if server is not None and not server.is_usable:
                server.end()
                server = None
            if server is None:
                server = self._servers[key] = _KeptServer(providers)
            return server

    def fork(self, log_path: Path, memory_limit: int | None) -> Fork:
        """A fork instead of a fresh interpreter."""
        return Fork(self.get())

    def end(self, *but: Variables) -> None:
        """End all of them but those for the variables ``but``."""
        with self._lock:
            for key in [key for key in self._servers if key[0] not in but]:
                self._servers.pop(key).end()


def inherited() -> Variables:
    """What workers inherit now, without what each test sets or removes and no worker reads."""
    variables = worker_environment().items()
    return frozenset((name, value) for name, value in variables if not name.startswith(_OF_TESTS))
