"""One server that forks the workers of all tests of a process: starting one for each takes half of the time.

It is the real one, and so are its workers. Only closing it waits until the tests have ended.
"""

from __future__ import annotations

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.ipc.fork_server import ForkServer
from hatch_epcontext.ipc.running import worker_environment


class _KeptServer(ForkServer):
    """A server that is still there when a build has ended."""

    def close(self) -> None:
        """Leave it to the next build."""

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> None:
        """End it, and all its workers."""
        super().close()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


class KeptServers:
    """The servers by the variables that their workers inherit."""

    def __init__(self) -> None:
        self._servers: dict[frozenset[tuple[str, str]], _KeptServer] = {}
        self._usual = _inherited()

    def get(self) -> _KeptServer:
        """The server for the variables of this moment; it is started if there is none."""
        key = _inherited()
        server = self._servers.get(key)
        if server is None or server.has_ended:
            server = self._servers[key] = _KeptServer()
        return server

    def end_unusual(self) -> None:
        """End those for variables that one test has set."""
        for key in self._servers.keys() - {self._usual}:
            self._servers.pop(key).end()

    def end(self) -> None:
        """End all of them."""
        while self._servers:
            self._servers.popitem()[1].end()


def _inherited() -> frozenset[tuple[str, str]]:
    """What workers inherit, without what each test sets and no worker reads."""
    variables = worker_environment().items()
    return frozenset(
        (name, value)
        for name, value in variables
        if not name.startswith(PREFIX) and name != "PYTEST_CURRENT_TEST"
    )
