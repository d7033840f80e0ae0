"""Each front end in each way, and the tables in ``docs/builds.md`` that say what it did.

With the environment variable ``WRITE_FRONT_ENDS`` the tables are written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hatch_epcontext.tools.inspecting import inspect, verify
from tests.conftest import printed_json
from tests.front_ends import page
from tests.front_ends.front_ends import FRONT_ENDS, FrontEnd
from tests.integration.conftest import Environment, make_environment, run
from tests.models import network, save

pytestmark = [pytest.mark.front_ends, pytest.mark.network, pytest.mark.slow]

PROJECT = """
[build-system]
requires = ["hatchling", "hatch-epcontext"]
build-backend = "hatchling.build"

[project]
name = "my-app"
version = "1.0"
requires-python = ">=3.10"

[tool.hatch.envs.plain]
dev-mode = false

[tool.hatch.build.targets.sdist]
include = ["/my_app", "/models", "/README.md"]
exclude = ["/my_app/only_here.txt"]

[tool.hatch.build.targets.wheel]
packages = ["my_app"]

[tool.hatch.build.targets.wheel.hooks.epcontext]

[tool.epcontext]
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]

[tool.epcontext.targets.any]
provider = "cpu"
"""

BESIDE = (
    PROJECT.replace(
        '"hatch-epcontext"]', '"hatch-epcontext", "hatch-vcs", "hatch-fancy-pypi-readme"]'
    )
    .replace('version = "1.0"', 'dynamic = ["version", "readme"]')
    .replace('"/README.md"]', '"/README.md", "/hatch_build.py"]')
    + """
[tool.hatch.version]
source = "vcs"

[tool.hatch.build.hooks.vcs]
version-file = "my_app/_version.py"

[tool.hatch.build.targets.wheel.hooks.custom]

[tool.hatch.metadata.hooks.fancy-pypi-readme]
content-type = "text/markdown"
fragments = [{ path = "README.md" }, { text = "The end of the readme." }]
"""
)
"""The same project, whose version, description and one file are made by others."""

CUSTOM_HOOK = """
from pathlib import Path
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        made = Path(self.directory, "made.py")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("made = True")
        build_data["force_include"][str(made)] = "my_app/made.py"
"""

CHECK = """
import json
try:
    import my_app.epcontext as found
except ModuleNotFoundError:
    print(json.dumps(None))
else:
    print(json.dumps([found.__file__, found.models()]))
"""

WORKS = "works"
NOT_OFFERED = "not offered"
SHOWN, END, NOT_SHOWN = "shown", "only its end", "not shown"
WITH_V = "only with `-v`"
WITHOUT_HOOK = "without the hook"
HEADLINE = {"configuration": "epcontext: invalid configuration", "model": "epcontext: build failed"}
"""How the messages of `_broken` begin."""


def _broken(what: str) -> str:
    """The configuration of a project that cannot be built; its message has more than ten lines."""
    if what == "model":
        models = ", ".join(f'"models/{name}.onnx"' for name in "vwxyz")
        return PROJECT.replace('{ path = "models/a.onnx", dims = { batch = 1 } }', models)
    return PROJECT + "".join(f'[tool.epcontext.targets.{n}]\nprovider = "none"\n' for n in "bcdef")


Tools = tuple[FrontEnd, Environment]
"""A front end and the environment that it is installed in."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One front end, installed in ``tools``, and a folder for its projects."""

    front_end: FrontEnd
    tools: Environment
    env: Mapping[str, str]
    sources: str
    folder: Path
    sdist: Path

    def project(self, name: str, toml: str = PROJECT) -> Path:
        """A new folder with the project."""
        root = self.folder / name / "my-app"
        (root / "my_app").mkdir(parents=True)
        (root / "my_app" / "__init__.py").touch()
        (root / "my_app" / "only_here.txt").touch()
        (root / "README.md").write_text("# My app\n", encoding="utf-8")
        (root / "pyproject.toml").write_text(f"{toml}\n{self.sources}", encoding="utf-8")
        save(network(), root / "models" / "a.onnx")
        for damaged in "vwxyz":
            (root / "models" / f"{damaged}.onnx").write_bytes(b"no model")
        return root

    def run(self, commands: str, project: Path, *, fails: bool = False) -> str:
        """Run ``commands`` in the project; the last one must fail if ``fails``. Their whole output."""
        words = {
            "OUT": str(self.out(project)),
            "SDIST": str(self.sdist),
            "PYTHON": str(self.tools.executable("python")),
        }
        printed = ""
        *first, last = commands.split(" && ")
        for command in (*first, last):
            program, *rest = (words.get(word, word) for word in command.split())
            path, fails_here = self.tools.executable(program), fails and command == last
            printed += run(path, *rest, cwd=project, env=self.env, fails=fails_here)
        return printed

    @staticmethod
    def out(project: Path) -> Path:
        return project.parent / "out"

    def built(self, project: Path) -> Path:
        """The wheel in the folder for what is built, whose models are verified."""
        (wheel,) = self.out(project).glob("*.whl")
        verify(wheel, inspect(wheel))
        return wheel


def wheel_twice(trial: Trial) -> dict[str, str]:
    """A wheel, and another one of the same project."""
    (command,) = trial.front_end.ways["wheel"]
    project = trial.project("wheel")
    line = "a -> any (cpu): ok, optimized graph"
    first = trial.run(command, project)
    trial.built(project).unlink()
    again = trial.run(trial.front_end.flagged(command, "-v"), project)
    trial.built(project)
    report = json.loads(Path(trial.env["HATCH_EPCONTEXT_REPORT"]).read_text(encoding="utf-8"))
    cached = [job["cached"] for job in report["jobs"]]
    return {
        "wheel": WORKS,
        "second": "from the cache" if cached == [True] else "compiled again",
        "lines": SHOWN if line in first else WITH_V if line in again else NOT_SHOWN,
    }


def from_sdist(trial: Trial) -> str:
    (command,) = trial.front_end.ways["sdist"]
    project = trial.project("sdist")
    trial.run(command, project)
    with zipfile.ZipFile(trial.built(project)) as archive:
        from_tree = "my_app/only_here.txt" in archive.namelist()
    if "SDIST" in command:
        assert not from_tree
        return "makes no sdist, takes one"
    assert list(trial.out(project).glob("*.tar.gz"))
    return "both, each from the project" if from_tree else WORKS


def installed(trial: Trial, way: str) -> str:
    """Whether the app finds its models after an install, with each of the commands."""
    found = {_install(trial, way, each) for each in trial.front_end.ways.get(way, ())}
    return ", ".join(sorted(found)) or NOT_OFFERED


def _install(trial: Trial, way: str, commands: str) -> str:
    project = trial.project(f"{way}-{len(list(trial.folder.glob(way + '-*')))}")
    trial.run(commands, project)
    script = trial.folder / "check.py"
    script.write_text(CHECK, encoding="utf-8")
    # Not from the project's folder, which Python would import from.
    printed = trial.run(f"{trial.front_end.python[way]} -I {script}", project)
    found = printed_json(printed)
    if found is None:
        return WITHOUT_HOOK
    file, models = found
    assert models == ["a"]
    assert Path(file).is_relative_to(project / "my_app") == (way == "editable")
    return WORKS


def beside(trial: Trial) -> str:
    """A wheel to which other plugins contribute too."""
    project = trial.project("beside", BESIDE + trial.front_end.for_dynamic_version)
    (project / "hatch_build.py").write_text(CUSTOM_HOOK, encoding="utf-8")
    for command in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"),
        ("tag", "v1.2"),
    ):
        run("git", *command, cwd=project, env=trial.env)
    trial.run(trial.front_end.ways["wheel"][0], project)
    wheel = trial.built(project)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("my_app-1.2.dist-info/METADATA").decode()
        assert {"my_app/_version.py", "my_app/made.py"} <= set(archive.namelist())
    assert "\nVersion: 1.2\n" in metadata
    assert metadata.rstrip().endswith("# My app\nThe end of the readme.")
    return WORKS


def failing(trial: Trial, way: str) -> str:
    """Whether the messages of failing builds are shown."""
    commands = trial.front_end.ways.get(way)
    # Where the hook does not run, nothing fails.
    cells = page.read()[trial.front_end.name]
    if commands is None or (way == "editable" and cells[way] == WITHOUT_HOOK):
        return "-"
    found = {_message(trial, commands[0], what, f"{way}-{what}") for what in HEADLINE}
    return ", ".join(sorted(found))


def quiet(trial: Trial) -> str:
    """Whether the message of a failing build is shown although the front end is to be quiet."""
    command = trial.front_end.flagged(trial.front_end.ways["wheel"][0], "-q")
    return _message(trial, command, "configuration", "quiet")


def _message(trial: Trial, command: str, what: str, name: str) -> str:
    """How much is printed of the message of a build that fails, and with which flag."""
    project = trial.project(f"failing-{name}", _broken(what))
    printed = trial.run(command, project, fails=True)
    if HEADLINE[what] in printed:
        return SHOWN
    short = END if "EPC" in printed else NOT_SHOWN
    if " -q" in command:
        return short
    (*first, last) = command.split(" && ")
    verbose = " && ".join([*first, trial.front_end.flagged(last, "-v")])
    again = trial.run(verbose, trial.project(f"failing-{name}-v", _broken(what)), fails=True)
    whole = HEADLINE[what] in again
    return short if not whole else WITH_V if short == NOT_SHOWN else f"{short}, all with `-v`"


def without_isolation(trial: Trial) -> str:
    """A wheel, built in an environment that has all that is needed."""
    commands = trial.front_end.ways.get("no isolation")
    if commands is None:
        return NOT_OFFERED
    trial.tools.install("hatch-epcontext[cpu]", "hatchling", "editables")
    project = trial.project("no-isolation")
    trial.run(commands[0], project)
    trial.built(project)
    return f"`{commands[0].split()[0]}` does" if "hatchling" in commands[0] else WORKS


@pytest.fixture(scope="module")
def sdist(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's sdist."""
    tmp_path = tmp_path_factory.mktemp("sdist")
    trial = Trial(FRONT_ENDS[0], Environment(tmp_path, env), env, "", tmp_path / "first", tmp_path)
    project = trial.project("sdist")
    tools = make_environment(tmp_path / "hatchling", env)
    tools.install("hatchling", "hatch-epcontext")
    hatchling = tools.executable("hatchling")
    run(hatchling, "build", "-t", "sdist", "-d", tmp_path, cwd=project, env=env)
    return tmp_path / "my_app-1.0.tar.gz"


OBSERVATIONS: Mapping[str, Callable[[Trial], dict[str, str]]] = {
    "wheel": wheel_twice,
    "sdist": lambda trial: {"sdist": from_sdist(trial)},
    "install": lambda trial: {"install": installed(trial, "install")},
    "editable": lambda trial: {"editable": installed(trial, "editable")},
    "beside": lambda trial: {"beside": beside(trial)},
    "failing": lambda trial: {"failing": failing(trial, "wheel")},
    "failing-install": lambda trial: {"failing install": failing(trial, "editable")},
    "quiet": lambda trial: {"quiet": quiet(trial)},
    "no-isolation": lambda trial: {"no isolation": without_isolation(trial)},
}
"""What is observed together, as cells of the page's table by row."""


@pytest.fixture(scope="module", params=FRONT_ENDS, ids=lambda each: each.name)
def tools(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tools:
    """Each front end, in an environment of its own."""
    front_end: FrontEnd = request.param
    # With the index of this machine, because the wheelhouse has no front ends.
    made = make_environment(tmp_path_factory.mktemp(front_end.name) / "tools", os.environ)
    made.install(*front_end.packages)
    return front_end, made


@pytest.mark.parametrize("what", OBSERVATIONS)
def test_the_page_says_what_each_front_end_does(
    tools: Tools,
    what: str,
    env: dict[str, str],
    index: str,
    sdist: Path,
    wheelhouse: Path,
    tmp_path: Path,
) -> None:
    front_end, made = tools
    scripts = made.executable("python").parent
    env |= {
        "HATCH_EPCONTEXT_CACHE_DIR": str(tmp_path / "cache"),
        "HATCH_EPCONTEXT_REPORT": str(tmp_path / "report.json"),
        "PATH": os.pathsep.join([str(scripts), env["PATH"]]),
    }
    sources = front_end.sources.replace("INDEX", index).replace("LINKS", wheelhouse.as_uri())
    folder = tmp_path / "projects"
    trial = Trial(front_end, Environment(made.folder, env), env, sources, folder, sdist)
    seen = OBSERVATIONS[what](trial)
    shutil.rmtree(folder, ignore_errors=True)
    cells = page.read()
    if "WRITE_FRONT_ENDS" in os.environ:
        cells[front_end.name] = {**cells.get(front_end.name, {}), **seen}
        page.write(cells)
        cells = page.read()
    assert {row: cells[front_end.name][row] for row in seen} == seen
