"""``epcontext inspect``: shows the facts of a model, a wheel or an installed package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from hatch_epcontext.build.artifact import Validation
from hatch_epcontext.build.coverage import describe_coverage
from hatch_epcontext.cli._output import show, table
from hatch_epcontext.ipc.protocol import InspectReply, TensorFacts
from hatch_epcontext.package.manifest import Manifest, TargetEntry
from hatch_epcontext.providers import find
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import count, show_size
from hatch_epcontext.tools import inspect as tool


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--verify", is_flag=True, help="Check that all files exist, as the manifest records them."
)
def inspect(path: Path, as_json: bool, verify: bool) -> None:
    """Show the facts of a model, a wheel or a package.

    PATH is an ONNX model (compiled or not), a wheel, or a package's folder. Needs no ONNX Runtime, but onnx
    for an ONNX model.
    """
    found = tool.inspect(path)
    if as_json:
        click.echo(to_json(found), nl=False)
    elif found.model is not None:
        _show_model(found.model)
    else:
        for folder, manifest in found.manifests.items():
            _show_manifest(folder, manifest)
    if verify:
        click.echo(f"verified: {count(tool.verify(path, found), 'file')}", err=as_json)


def _show_model(model: InspectReply) -> None:
    for heading, tensors in (("inputs", model.inputs), ("outputs", model.outputs)):
        for tensor in tensors:
            click.echo(f"{heading[:-1]} {_tensor(tensor)}")
    click.echo(f"opsets: {_listed(model.opsets)}")
    if model.operators:
        kind = "not in a context" if model.contexts else "operators"
        click.echo(f"{kind}: {_listed(model.operators)}")
    for ep, text in model.compatibility.items():
        click.echo(f"compatibility with {ep}: {text}")
        if chip := _compiled_for(ep, text):
            click.echo(f"compiled for: {_listed(chip)}")
    if model.contexts:
        made = table("context", "EP", "SDK", "blob", "size", "sha256")
        for context in model.contexts:
            blob = context.sidecar or ("inside" if context.main else "in another context")
            if context.sidecar and context.sha256 is None:
                blob += " (missing)"
            made.add_row(
                context.node,
                context.source,
                context.ep_sdk_version,
                blob,
                show_size(context.size) if context.size else "",
                (context.sha256 or "")[:12],
            )
        show(made)
    for name in model.external_data:
        click.echo(f"external data: {name}")
    for name in model.outside:
        click.echo(f"external data outside of its folder: {name}")


def _show_manifest(folder: str, manifest: Manifest) -> None:
    size = show_size(sum(file.size for file in manifest.files.values()))
    click.echo(f"{folder}: {manifest.generator}, {count(len(manifest.files), 'file')}, {size}")
    made = table("model", "target", "EP", "for", "coverage", "validation", "size")
    for name, model in manifest.models.items():
        for entry in model.targets:
            made.add_row(
                name,
                entry.target,
                entry.settings.ep,
                _listed(_compiled_for(entry.settings.provider, entry.compatibility_string)),
                describe_coverage(entry.coverage),
                _summarize(entry.validation),
                show_size(_size_of(entry, manifest)),
            )
        if model.source.model_file is not None:
            source = manifest.files[model.source.model_file]
            made.add_row(name, "source", "", "", "", "", show_size(source.size))
    show(made)


def _compiled_for(name: str, compatibility: str) -> Mapping[str, str]:
    # Another version of the package, or another tool, can have other providers.
    provider = find(name)
    return provider.compiled_for(compatibility) if provider else {}


def _size_of(entry: TargetEntry, manifest: Manifest) -> int:
    """Bytes of the artifact, which is the same for all models that share weights."""
    folder = entry.model_file.rpartition("/")[0]
    return sum(file.size for name, file in manifest.files.items() if name.startswith(f"{folder}/"))


def _summarize(validation: Validation) -> str:
    cosine = f", cosine {validation.cosine:.5f}" if validation.cosine is not None else ""
    return validation.label + cosine


def _tensor(tensor: TensorFacts) -> str:
    return f"{tensor.name}: {tensor.dtype}, {tensor.shape_text or 'scalar'}"


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
