"""The build hook: Hatch's calls become parts of a build, and typed errors become one message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from hatch_epcontext.hatch_build import HatchBuild


# Not subscripted: the number of its type parameters differs between releases of hatchling.
class EpcontextBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the models in ``[tool.epcontext]`` and ships them in the wheel; an sdist gets their sources.

    The methods import the core: Hatch loads the class in every build in an environment with the package, and
    few of these builds use it.
    """

    PLUGIN_NAME = "epcontext"

    _build: HatchBuild | None = None

    def dependencies(self) -> list[str]:
        """The build requirements of the selected targets, for the front end to install."""
        if self._reason_to_skip():
            return []
        with self._errors_as_message():
            return self._new_build().requirements()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build all jobs, and pass the files to Hatch; an editable install gets them in the project.

        ``version``: Hatch's name of the kind of wheel, ``"standard"`` or ``"editable"``.
        """
        if reason := self._reason_to_skip():
            self.app.display_info(f"epcontext: skipped: {reason}")
            return
        from hatch_epcontext.system import terminated_as_error

        with terminated_as_error(), self._errors_as_message():
            self._build = self._new_build()
            if self.target_name == "sdist":
                self._build.fill_sdist(build_data)
            elif version == "editable":
                self._build.install_editable()
            else:
                self._build.fill_wheel(build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Verify the finished wheel; an invalid one is removed. An editable install gets its files.

        These are written only now, so that a failed install leaves nothing in the project.
        """
        if self._build is not None:
            with self._errors_as_message():
                self._build.finish(Path(artifact_path))

    def _new_build(self) -> HatchBuild:
        from hatch_epcontext.hatch_build import HatchBuild

        return HatchBuild(self)

    def _reason_to_skip(self) -> str | None:
        """The reason why the hook does nothing in this build, if there is one."""
        from hatch_epcontext.config.environ import reason_to_skip

        if self.target_name not in ("wheel", "sdist"):
            return f"the target is {self.target_name}, and only wheels and sdists contain models"
        return reason_to_skip()

    @contextlib.contextmanager
    def _errors_as_message(self) -> Iterator[None]:
        """Turn expected errors into one message without a traceback."""
        from hatch_epcontext.project_build import message_of

        try:
            yield
        except BaseException as error:
            if self._build is not None:
                self._build.close()
            if message := message_of(error, Path(self.root)):
                self.app.abort(*message)
            raise
