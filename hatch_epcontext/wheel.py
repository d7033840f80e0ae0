"""Artifacts -> what the wheel gets, and proof of the finished wheel."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hatch_epcontext import manifest
from hatch_epcontext.artifact import link_or_copy, record_file
from hatch_epcontext.config import Config
from hatch_epcontext.errors import ConfigError, Problem, WheelError
from hatch_epcontext.fingerprint import stream_sha256
from hatch_epcontext.result import Result
from hatch_epcontext.structure import from_json, show_size, to_json
from hatch_epcontext.tables import KEY

Tree = Mapping[str, Path]
"""The project's files that go into the wheel, by their path there, with forward slashes."""


@dataclass(frozen=True)
class Bundle:
    """The package that the wheel gets: ``files`` in ``folder``, by their path below the output folder."""

    folder: Path
    files: tuple[str, ...]

    def entries(self, output: PurePosixPath) -> dict[str, str]:
        """Absolute path -> path in the wheel, as Hatch's ``force_include`` wants it."""
        return {str(self.folder / name): str(output / name) for name in self.files}


def output_folder(configured: PurePosixPath | None, tree: Tree) -> PurePosixPath:
    """Where in the wheel the package goes; raises ConfigError when that has to be said.

    By default ``<import package>/epcontext``, for the one outermost package of the wheel.
    """
    if configured is not None:
        return configured
    packages = {PurePosixPath(path).parent for path in tree if path.endswith("/__init__.py")}
    outermost = sorted(str(p) for p in packages if packages.isdisjoint(p.parents))
    if len(outermost) != 1:
        found = f"it has {', '.join(outermost)}" if outermost else "it has none"
        raise ConfigError(
            Problem(
                f"{KEY}.output",
                f"is not given, and the wheel has no one import package to put it in: {found}.",
                'Name the folder in the wheel, such as output = "my_app/epcontext".',
            )
        )
    return PurePosixPath(outermost[0], "epcontext")


def check_collisions(output: PurePosixPath, tree: Tree, ours: frozenset[str]) -> None:
    """Raise ConfigError when the project has files of its own where the package goes.

    ``ours``: paths in the wheel that an earlier editable install wrote into the project.
    """
    taken = sorted(
        path
        for path in tree
        if path not in ours
        and (PurePosixPath(path).is_relative_to(output) or path == f"{output}.py")
    )
    if taken:
        shown = ", ".join(taken[:5]) + (f" and {len(taken) - 5} more" if len(taken) > 5 else "")
        raise ConfigError(
            Problem(
                f"{KEY}.output",
                f'the wheel has files of the project\'s own in "{output}": {shown}.',
                "Give the models a folder of their own, such as "
                f'output = "{output.parts[0]}/epcontext".'
                if len(output.parts) == 1
                else "Give the models a folder of their own.",
            )
        )


def bundle(result: Result, config: Config, staging: Path) -> Bundle:
    """Lay out the artifacts, the sources if they are shipped, the loader and the manifest in ``staging``."""
    folder = staging / "bundle"
    folder.mkdir()
    for built in result.built:
        shutil.copytree(
            built.artifact.folder, folder / built.job.folder, copy_function=link_or_copy
        )
    files = manifest.artifact_files(result)
    sources: dict[str, str | None] = {}
    for source in result.sources:
        model = source.model
        sources[model.name] = None
        if config.fallback == "source":
            shipped = manifest.source_folder(model.name)
            sources[model.name] = f"{shipped}/{model.path.name}"
            for name in (model.path.name, *source.facts.external_data):
                target = folder / shipped / name
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy((model.path.parent / name).resolve(), target)
                files[f"{shipped}/{name}"] = record_file(target)
    shutil.copyfile(manifest.loader(), folder / "__init__.py")
    files["__init__.py"] = record_file(folder / "__init__.py")
    made = manifest.make(result, sources, files)
    (folder / manifest.FILE).write_text(to_json(made), encoding="utf-8", newline="\n")
    return Bundle(folder, (*files, manifest.FILE))


def tag(config: Config) -> str | None:
    """The wheel's tag, or None to leave it to Hatch.

    It tells what the models are for, not where they were compiled: ``"auto"`` joins the platforms of
    all targets, and leaves it to Hatch as soon as one target is for any platform.
    """
    if config.wheel_tag == "any":
        return "py3-none-any"
    if config.wheel_tag != "auto":
        return config.wheel_tag
    platforms = [target.platforms for target in config.targets]
    if not platforms or not all(platforms) or any("any" in each for each in platforms):
        return None
    return f"py3-none-{'.'.join(sorted({p for each in platforms for p in each}))}"


def prove(wheel: Path, output: PurePosixPath) -> int:
    """Check the package at ``output`` in a finished wheel against its own manifest.

    Returns the number of files that were read and found right. Raises WheelError when one is missing,
    different or not in the manifest.
    """
    where = f"{wheel.name}: {output}"
    with zipfile.ZipFile(wheel) as archive:
        prefix = f"{output}/"
        inside = {name for name in archive.namelist() if name.startswith(prefix)}
        if prefix + manifest.FILE not in inside:
            raise WheelError(Problem(where, f"has no {manifest.FILE}."))
        listed = from_json(archive.read(prefix + manifest.FILE), manifest.Manifest).files
        problems = [
            Problem(where, f"{name} is in the manifest and not in the wheel.")
            for name in listed
            if prefix + name not in inside
        ]
        for name, recorded in listed.items():
            if prefix + name in inside and _sha256(archive, prefix + name) != recorded.sha256:
                problems.append(Problem(where, f"{name} is not what the manifest says."))
        strays = sorted(inside - {prefix + name for name in (*listed, manifest.FILE)})
    problems += [
        Problem(
            where,
            f"{path.removeprefix(prefix)} is in the wheel and not in the manifest.",
            "Remove it from the project, or give the models another output folder.",
        )
        for path in strays
    ]
    if problems:
        raise WheelError(*problems)
    return len(listed)


WARN_AT = 100 * 10**6
"""Bytes of a wheel from which package indexes refuse it, unless they are asked beforehand."""

MOST_FILES = 10
"""How many files the breakdown of a large wheel names."""


def check_size(wheel: Path, max_size: int | None) -> str:
    """What is to be said of a wheel that is large, with its largest files; "" if it is not.

    Raises WheelError when it is larger than ``max_size``, in bytes.
    """
    size = wheel.stat().st_size
    if size <= (WARN_AT if max_size is None else max_size):
        return ""
    with zipfile.ZipFile(wheel) as archive:
        files = sorted(archive.infolist(), key=lambda file: file.compress_size, reverse=True)
    lines = [f"  {show_size(file.compress_size)}  {file.filename}" for file in files[:MOST_FILES]]
    if (more := len(files) - MOST_FILES) > 0:
        lines.append(f"  and {more} smaller ones")
    told = "\n".join([f"{wheel.name} has {show_size(size)}", *lines])
    if max_size is None:
        return (
            f"{told}\n  By default indexes take files of up to {show_size(WARN_AT)}: ask for more, "
            "ship fewer targets, or say with max-size what is expected."
        )
    raise WheelError(
        Problem(
            f"{KEY}.max-size",
            f"{told}\nand at most {show_size(max_size)} are allowed.",
            "Ship fewer targets, share weights, or raise it.",
        )
    )


def _sha256(archive: zipfile.ZipFile, name: str) -> str:
    with archive.open(name) as file:
        return stream_sha256(file)
