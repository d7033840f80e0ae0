"""``epcontext inspect``: what a model, a wheel or an installed package says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from hatch_epcontext.artifact import Proof
from hatch_epcontext.cli.output import show, table
from hatch_epcontext.inspection import inspect as look
from hatch_epcontext.inspection import verify as check
from hatch_epcontext.manifest import Manifest, TargetEntry
from hatch_epcontext.protocol import DescribeReply, TensorFacts
from hatch_epcontext.structure import show_size, to_json


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--verify", is_flag=True, help="Check that all files are there, as the manifest says."
)
def inspect(path: Path, as_json: bool, verify: bool) -> None:
    """Show what a model, a wheel or a package says of itself.

    PATH is an ONNX model (compiled or not), a wheel, or a package's folder.
    It needs no ONNX Runtime; for an ONNX model it needs onnx.
    """
    found = look(path)
    if as_json:
        click.echo(to_json(found), nl=False)
    elif found.model is not None:
        _show_model(found.model)
    else:
        for folder, manifest in found.manifests.items():
            _show_manifest(folder, manifest)
    if verify:
        count = check(path, found)
        noun = "file is" if count == 1 else "files are"
        click.echo(f"verified: {count} {noun} there, as they should be", err=as_json)


def _show_model(model: DescribeReply) -> None:
    for heading, tensors in (("inputs", model.inputs), ("outputs", model.outputs)):
        for tensor in tensors:
            click.echo(f"{heading[:-1]} {_tensor(tensor)}")
    click.echo(f"opsets: {_listed(model.opsets)}")
    if model.operators:
        kind = "not in a context" if model.contexts else "operators"
        click.echo(f"{kind}: {_listed(model.operators)}")
    for ep, text in model.compatibility.items():
        click.echo(f"compatible with {ep}: {text}")
    if model.contexts:
        made = table("context", "made by", "SDK", "blob", "size", "sha256")
        for context in model.contexts:
            blob = context.sidecar or ("inside" if context.main else "in another context")
            if context.sidecar and not context.sha256:
                blob += " (not there)"
            made.add_row(
                context.node,
                context.source,
                context.ep_sdk_version,
                blob,
                show_size(context.size) if context.size else "",
                context.sha256[:12],
            )
        show(made)
    for name in model.external_data:
        click.echo(f"external data: {name}")
    for name in model.outside:
        click.echo(f"external data outside of its folder: {name}")


def _show_manifest(folder: str, manifest: Manifest) -> None:
    size = sum(file.size for file in manifest.files.values())
    click.echo(
        f"{folder}: made by {manifest.generator}, {len(manifest.files)} files, {show_size(size)}"
    )
    made = table("model", "target", "EP", "for", "coverage", "validated", "size")
    for name, model in manifest.models.items():
        for entry in model.targets:
            made.add_row(
                name,
                entry.target,
                entry.ep,
                _listed(entry.compiled_for),
                f"{entry.coverage.compiled}/{entry.coverage.nodes}" if entry.coverage else "",
                _validated(entry.validation),
                show_size(_size_of(entry, manifest)),
            )
        if model.source.model_file is not None:
            source = manifest.files[model.source.model_file]
            made.add_row(name, "source", "", "", "", "", show_size(source.size))
    show(made)


def _size_of(entry: TargetEntry, manifest: Manifest) -> int:
    """Bytes of the artifact, which models that share weights have in common."""
    folder = entry.model_file.rpartition("/")[0]
    return sum(file.size for name, file in manifest.files.items() if name.startswith(f"{folder}/"))


def _validated(proof: Proof) -> str:
    told = {"run": "ran", "cpu": "ran on the CPU only", "alone": "ran alone", "none": "no"}
    return told.get(proof.how, "structure only") + (
        f", cosine {proof.cosine:.5f}" if proof.cosine is not None else ""
    )


def _tensor(tensor: TensorFacts) -> str:
    return f"{tensor.name}: {tensor.dtype}, {tensor.words or 'scalar'}"


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
