"""``epcontext inspect``: shows the facts of a model, a wheel or a model package."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from hatch_epcontext.cli._common import echo, show_table
from hatch_epcontext.graph.facts import Size
from hatch_epcontext.jobs.boards import describe_run
from hatch_epcontext.jobs.report import describe_coverage, describe_validation, describe_values
from hatch_epcontext.package.manifest import ModelPackage
from hatch_epcontext.providers import describe_chip
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.text import count, pairs, show_size
from hatch_epcontext.tools import inspecting as tool
from hatch_epcontext.worker.requests import InspectReply
from hatch_epcontext.worker.results import Validation


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--markdown", is_flag=True, help="Print a table for a README: what is compiled, and for what."
)
@click.option(
    "--verify", is_flag=True, help="Check that all files exist, as the manifest has them."
)
def command(path: Path, as_json: bool, markdown: bool, verify: bool) -> None:
    """Show the facts of a model, a wheel or a model package.

    PATH is an ONNX model (compiled or not), a wheel, or the folder of a model package that epcontext wrote.
    An ONNX model needs onnx, but not ONNX Runtime.

    --verify fails if a file is missing or differs from the manifest (in a wheel: by RECORD), or if a wheel
    has no models.
    """
    if as_json and markdown:
        raise click.UsageError("Choose --json or --markdown.")
    inspection = tool.inspect(path)
    if markdown and inspection.model is not None:
        raise click.UsageError("--markdown is for a wheel or a model package.")
    if as_json:
        # Not sorted: variants are in the order of preference.
        click.echo(json.dumps(to_plain(inspection), indent=2).replace("\x7f", "\\u007f"))
    elif inspection.model is not None:
        _show_model(inspection.model)
    elif markdown:
        for line in _markdown(inspection.packages.values()):
            echo(line)
    else:
        for folder, package in inspection.packages.items():
            _show_package(str(path) if folder == "." else folder, package)
    if verify:
        verified = count(tool.verify(path, inspection), "file")
        echo(f"verified: {verified}", err=as_json or markdown)


def _show_model(model: InspectReply) -> None:
    for heading, tensors in (("inputs", model.inputs), ("outputs", model.outputs)):
        for tensor in tensors:
            shape = tensor.shape_text or "scalar"
            echo(f"{heading[:-1]} {tensor.name}: {tensor.dtype}, {shape}")
    echo(f"opsets: {pairs(model.opsets)}")
    if model.operators:
        kind = "not in a context" if model.contexts else "operators"
        echo(f"{kind}: {pairs(model.operators)}")
    for ep, text in model.compatibility.items():
        echo(f"compatibility with {ep}: {text}")
        if chip := describe_chip(ep, text):
            echo(f"compiled for: {chip}")
    if model.contexts:
        contexts = []
        for context in model.contexts:
            blob = context.sidecar or ("inside" if context.main else "in another context")
            if context.sidecar and context.sha256 is None:
                blob += " (missing)"
            size = show_size(context.size) if context.size else ""
            sha256 = (context.sha256 or "")[:12]
            contexts.append(
                (context.node, context.source, context.ep_sdk_version, blob, size, sha256)
            )
        show_table(("context", "EP", "SDK", "blob", "size", "sha256"), contexts)
    for name in model.external_data:
        echo(f"external data: {name}")
    for name in model.outside:
        echo(f"external data outside of its folder: {name}")


def _show_package(folder: str, package: ModelPackage) -> None:
    files = package.files
    total = show_size(sum(file.size for file in files.values()))
    echo(f"{folder}: {package.about.generator}, {count(len(files), 'file')}, {total}")
    rows, lines, sizes = [], list[str](), Counter[str]()
    folders = {variant.variant_directory for _, _, variant in package.variants}
    for file, record in files.items():
        # The folder of a language model has those of its targets inside.
        inside = (folder for folder in folders if file.startswith(f"{folder}/"))
        sizes[max(inside, key=len, default="")] += record.size
    for name, target, variant in package.variants:
        # Models that share a folder share its files.
        size = sizes.pop(variant.variant_directory, 0)
        about = variant.about
        provider = about.settings.provider if about else variant.ep
        compatibility = variant.compatibility_string or ""
        row = (
            name,
            target,
            variant.ep,
            describe_chip(provider, compatibility) or compatibility,
            describe_coverage(about.coverage) if about else "",
            _summarize(about.validation) if about else "",
            show_size(size) if size else "",
        )
        rows.append(row)
        if about:
            facts = *map(describe_values, about.validation.inputs), *map(describe_run, about.boards)
            lines += (f"{name} for {target}: {fact}" for fact in facts)
    show_table(("model", "target", "EP", "for", "coverage", "validation", "size"), rows)
    for line in lines:
        echo(line)
    for name, component in package.components.items():
        for target, module in component.about.modules.items():
            if module:
                echo(f"{name} for {target}: in {module}, of {package.about.companions[module]}")
        for member, inputs in component.about.shapes.items():
            shapes = (f"{name} {_shape(shape)}" for name, shape in inputs.items())
            echo(f"{member}: a shape of {component.about.model}, {', '.join(shapes)}")


def _markdown(packages: Iterable[ModelPackage]) -> Iterator[str]:
    """A table of the compiled variants in ``packages``, and how builds and boards validated them."""
    yield "| model | target | for | compiled | validated | on hardware |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, target, variant in itertools.chain.from_iterable(p.variants for p in packages):
        if (about := variant.about) is not None:
            settings, text = about.settings, variant.compatibility_string or ""
            cells = (
                name,
                target,
                describe_chip(settings.provider, text) or variant.ep,
                describe_coverage(about.coverage),
                describe_validation(about.validation, with_reason=False),
                "; ".join(map(describe_run, about.boards)),
            )
            # A report of a board is text of somebody else.
            plain = (re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", cell) for cell in cells)
            yield f"| {' | '.join(plain)} |"


def _shape(shape: Sequence[Size] | None) -> str:
    return (
        "of any rank"
        if shape is None
        else "x".join("?" if size is None else str(size) for size in shape)
    )


def _summarize(validation: Validation) -> str:
    cosine = f", cosine {validation.cosine:.5f}" if validation.cosine is not None else ""
    return describe_validation(validation, with_reason=False) + cosine
