"""What the commands on the pages need in order to run: where a new page or command gets its setting.

The commands of a page run one after the other in one folder, which begins with the files of `default`: a
project with two targets, and the models that the pages name. So most commands need nothing here. If one does:

- its page begins with other files or another configuration: give it a `Page` in `PAGES`; a file that the page
  itself shows in a block with a title is written without that;
- it needs what another command has written: name it in `BEFORE`, with the commands that write it;
- it is abbreviated, or takes too long: name it in `WRITTEN_OUT`, with what is run in its place;
- it cannot run without certain hardware: name it in `FAILING`, with the reason and the message;
- it needs what Python or another build has made before, by a line of the page: name that in `SCRIPTS`;
- it prints something else than its page shows, such as of another model: name it in `OTHER_OUTPUT`;
- it is a part of a sentence, and nobody types it like this: name it in `NOT_RUN`, with the reason.

A command is named as its page has it, with single spaces. What no page has is an error, so that nothing here
remains when a page changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.language_models import make_folder
from tests.models import network, save
from tests.projects import HEAD

CONFIGURATION = """
[tool.epcontext.targets.x-elite]
provider = "qnn"
chip = "snapdragon-x-elite"

[tool.epcontext.targets.cpu]
provider = "cpu"

[[tool.epcontext.models]]
path = "models/digits.onnx"
dims = { batch = 1 }
"""

TWO_SHAPES = """
[tool.epcontext]
targets.cpu.provider = "cpu"
targets.cpu.static-shapes = true

[[tool.epcontext.models]]
name = "det"
path = "models/digits.onnx"
shapes = [{ x = [1, 1, 8, 8] }, { x = [2, 1, 8, 8] }]
"""

LANGUAGE_MODEL = """
[tool.epcontext]
models = ["models/llama"]
targets.cpu.provider = "cpu"
"""


def default(folder: Path, configuration: str = CONFIGURATION) -> None:
    """A project with the model ``digits``, and the models that pages compile without a project."""
    (folder / "my_app").mkdir()
    (folder / "my_app" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(HEAD + configuration, encoding="utf-8")
    save(network(), folder / "models" / "digits.onnx")
    save(network(), folder / "model.onnx")
    for name in (
        "models/detector.onnx",
        "model1.onnx",
        "model2.onnx",
        "prefill.onnx",
        "decode.onnx",
    ):
        save(network(1), folder / name)


def two_shapes(folder: Path) -> None:
    default(folder, TWO_SHAPES)


def language_model(folder: Path) -> None:
    default(folder, LANGUAGE_MODEL)
    make_folder(folder / "models" / "llama")


def companions(folder: Path) -> None:
    """The configuration of the page itself."""
    page = (REPOSITORY / "docs" / "companions.md").read_text(encoding="utf-8")
    head = HEAD.replace(HEAD[HEAD.index("[project]") : HEAD.index("[tool.hatch")], "")
    text = head + page.partition("```toml\n")[2].partition("```")[0]
    (folder / "digits_app").mkdir()
    (folder / "digits_app" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    save(network(), folder / "models" / "digits.onnx")


def empty(folder: Path) -> None:
    """The reader begins with nothing."""


def unconfigured(folder: Path) -> None:
    """A project that does not use hatch-epcontext yet."""
    (folder / "my_app").mkdir()
    (folder / "my_app" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text('[project]\nname = "my-app"\nversion = "1"\n', "utf-8")
    save(network(), folder / "my_app" / "digits.onnx")


def recorded(folder: Path) -> None:
    """A project whose app runs the model ``digits`` on each image that it is called with."""
    default(folder)
    (folder / "digits_app").mkdir()
    (folder / "digits_app" / "__main__.py").write_text(
        "import sys, numpy, onnxruntime\n"
        "session = onnxruntime.InferenceSession('models/digits.onnx')\n"
        "for number, _ in enumerate(sys.argv[1:]):\n"
        "    session.run(None, {'x': numpy.full((1, 1, 8, 8), number, numpy.float32)})\n",
        "utf-8",
    )


@dataclass(frozen=True)
class Page:
    project: Callable[[Path], None] = default
    """Writes what the reader has before the first command into a folder that exists."""


PAGES = {
    "docs/adopting.md": Page(unconfigured),
    "docs/companions.md": Page(companions),
    "docs/language-models.md": Page(language_model),
    "docs/validation.md": Page(recorded),
    "docs/shapes.md": Page(two_shapes),
    "docs/tutorial.md": Page(empty),
}
"""The pages that begin with something else than `default`."""

_ON_BOARD = "epcontext validate --package digits_app-1.0.0-py3-none-any.whl --report x-elite.json"
_WITH_SDIST = (
    "epcontext validate --package digits_app-1.0.0-py3-none-any.whl --sdist digits_app-1.0.0.tar.gz "
    "--report x-elite.json"
)

BEFORE = {
    **dict.fromkeys(
        (_ON_BOARD, _WITH_SDIST), ("epcontext export -o my_app/epcontext --overwrite",)
    ),
    "epcontext inspect '$wheel' --verify": ("epcontext export -o my_app/epcontext --overwrite",),
    "epcontext inspect --verify dist/my_app-1.0-py3-none-any.whl": (
        "epcontext export -o my_app/epcontext --overwrite",
    ),
    "epcontext validate model.ortpackage": (
        "epcontext compile model.onnx -o model.ortpackage -p qnn --set chip=snapdragon-x-elite --dim batch=1",
    ),
}
"""What is run before a command."""

WRITTEN_OUT = {
    # Its output goes into a file.
    "epcontext doctor --json '>' board.json": "epcontext doctor --json",
    "epcontext doctor --json '>' fleet/board.json": "epcontext doctor --json",
    # The wheel is that of another project: tests/cli/test_validate_report.py validates one.
    _ON_BOARD: "epcontext validate --package my_app/epcontext --report x-elite.json",
    _WITH_SDIST: "epcontext validate --package my_app/epcontext --sdist . --report x-elite.json",
    # The wheel is built by another build backend: tests/front_ends builds it.
    "epcontext inspect --verify dist/my_app-1.0-py3-none-any.whl": (
        "epcontext inspect --verify my_app/epcontext"
    ),
    "epcontext inspect '$wheel' --verify": "epcontext inspect --verify my_app/epcontext",
    "epcontext bench model.onnx -p qnn --set chip=snapdragon-x-elite --dim batch=1 --plot bench.png": (
        "epcontext bench model.onnx -p cpu --dim batch=1 --plot bench.png --starts 1 -n 1"
    ),
    "epcontext bench model.onnx -p qnn --set chip=snapdragon-x-elite --dim batch=1": (
        "epcontext bench model.onnx -p cpu --dim batch=1 --starts 1 -n 1"
    ),
    "epcontext bench MODEL... -p tensorrt-rtx": (
        "epcontext bench model.onnx -p cpu --dim batch=1 --starts 1 -n 1"
    ),
    "epcontext bench MODEL -p tensorrt-rtx --set load-options.enable_cuda_graph=true": (
        "epcontext bench model.onnx -p cpu --dim batch=1 --set embed=false --starts 1 -n 1"
    ),
    "epcontext bench --target x-elite": "epcontext bench --target cpu --starts 1 -n 1",
    "epcontext bench --target qnn": "epcontext bench --target cpu --starts 1 -n 1",
    "epcontext export '[PROJECT]' -o DIR": "epcontext export . -o DIR",
    "epcontext compile MODEL... -o NAME.ortpackage": (
        "epcontext compile model.onnx -o NAME.ortpackage -p cpu --dim batch=1"
    ),
    "epcontext companions --published https://pypi.org/simple": (
        "epcontext companions --published dist"
    ),
    # The app is not installed.
    "epcontext record -- digits-app samples/3.png": (
        f"epcontext record -- {sys.executable} -m digits_app samples/3.png"
    ),
    "epcontext compile model.onnx -o model.ortpackage -p qnn --set chip=snapdragon-x-elite": (
        "epcontext compile model.onnx -o model.ortpackage -p qnn --set chip=snapdragon-x-elite --dim batch=1"
    ),
    # In the help of the command the project is another folder.
    "epcontext export ../app --target x-elite -o build/models": (
        "epcontext export . --target x-elite -o build/models"
    ),
    # Its page compiles the same model for QNN too.
    "epcontext compile model.onnx -o model_ctx.onnx -p NvTensorRTRTXExecutionProvider": (
        "epcontext compile model.onnx -o rtx_ctx.onnx -p NvTensorRTRTXExecutionProvider"
    ),
}
"""What is run instead of an abbreviated command."""


@dataclass(frozen=True)
class Failing:
    reason: str
    code: int
    message: str
    """A regular expression for what it prints."""


FAILING = {
    "epcontext compile models/edges.onnx -o edges_ctx.onnx -p qnn": Failing(
        "the tutorial shows an error", 1, "Add --set dims.batch=1"
    ),
    "epcontext compile model.onnx -o model_ctx.onnx -p NvTensorRTRTXExecutionProvider": Failing(
        "needs a GPU of NVIDIA, and its driver", 1, "libcuda|not installed"
    ),
}
"""The commands that need what a machine for tests does not have."""

SCRIPTS = {
    "python make_model.py": ("make_model.py",),
    # Without isolation, which would install everything anew.
    "python -m build": ("-m", "hatchling", "build"),
}
"""The lines that call Python, and what Python is called with. Other lines than these are not run."""

OTHER_OUTPUT: dict[str, str] = {
    "epcontext doctor --library onnxruntime_qnn": "names the vendor of the machine's processor",
}
"""The commands that print something else here than on their page, each with the reason."""

NOT_RUN: dict[str, str] = {
    "epcontext validate --report": "names the command in a sentence",
    "epcontext doctor WHEEL...": "names the command in a sentence",
    **dict.fromkeys(
        (
            "epcontext doctor my_app-1.0-py3-none-any.whl --devices board.json --devices pc.json",
            "epcontext doctor 'dist/*.whl' --devices fleet/board.json --devices fleet/pc.json",
        ),
        "needs a wheel and other machines: tests/cli/test_doctor_wheel.py has it",
    ),
    "epcontext doctor --library PATH": "names the command in a sentence",
    "epcontext add hf://org/repo/onnx/model.onnx": "needs a network: tests/cli/test_downloads.py has it",
}
"""The commands that are a part of a sentence, each with the reason."""
