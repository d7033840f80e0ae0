"""Writes what is made from the package itself: ``python docs/generate.py``.

That is the page about providers, and the JSON schema of the configuration inside the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hatch_epcontext import schema
from hatch_epcontext.providers import PROVIDERS, Option, Provider

FOLDER = Path(__file__).parent

INTRODUCTION = """\
# Execution providers

<!-- Made from the registry by docs/generate.py. -->

What is known of each execution provider (EP), and what was tried with it. A provider is written as its name
here, as ONNX Runtime's name of the EP, or as another spelling of either, in any case.

EPs accept unknown options and impossible values in silence. Here they are errors, with a suggestion. If an
EP is newer than this page, `allow-unknown-options = true` in the target's table takes its options as they
are. `true`, `false` and numbers become the strings that the EP wants, and so do tables where an option
takes JSON.

An option counts when the model is compiled, when a session is opened, or both. All may stand in
`provider-options`; what only counts when a session is opened may also stand in `load-options`, and what
does not is not shipped. An address in the app's memory, such as that of a stream, can only be given by the
app: `load(name, provider_options={...})`.
"""

TRIED = """\
| provider | what it makes | installs | tried | on the hardware |
| --- | --- | --- | --- | --- |
"""

_SYSTEMS = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}
_SCOPES = {"compile": "compile", "load": "load", "both": "compile, load"}
_PRODUCTS = {"context": "EP contexts", "optimized": "optimized graphs"}


def providers() -> str:
    """The page about all providers."""
    parts = [INTRODUCTION, TRIED + "\n".join(map(_row, PROVIDERS.values())) + "\n"]
    return "\n".join([*parts, *("\n".join(_section(each)) for each in PROVIDERS.values())])


def _row(provider: Provider) -> str:
    cells = (
        f"[`{provider.name}`](#{provider.name})",
        f"{_PRODUCTS[provider.product]} for {provider.title}",
        _installs(provider),
        provider.verified,
        provider.hardware,
    )
    return f"| {' | '.join(cells)} |"


def _installs(provider: Provider) -> str:
    return ", ".join(f"`{name}`" for name in (provider.flavours[0], *provider.requirements))


def _section(provider: Provider) -> Iterator[str]:
    yield f"## {provider.name}\n"
    made = _PRODUCTS[provider.product]
    yield f"{made[0].upper()}{made[1:]} for {provider.title}.\n"
    yield "| | |\n| --- | --- |"
    for name, told in _facts(provider):
        yield f"| {name} | {told} |"
    yield ""
    for note in provider.notes:
        yield f"- {note}"
    if provider.notes:
        yield ""
    if provider.options:
        yield "| option | takes | default | counts for | |\n| --- | --- | --- | --- | --- |"
        for name, option in provider.options.items():
            yield _option(name, option)
        yield ""
    for heading, table in (
        ("Options of older releases, which the EP ignores", provider.retired),
        ("Options that are not the user's to set", provider.managed),
    ):
        if table:
            yield f"{heading}:\n"
            yield from (f"- `{name}`: {told}" for name, told in table.items())
            yield ""
    if provider.sources:
        yield f"Sources: {'; '.join(provider.sources)}.\n"


def _facts(provider: Provider) -> Iterator[tuple[str, str]]:
    if provider.ep:
        yield "ONNX Runtime calls it", f"`{provider.ep}`"
    if provider.aliases:
        yield "also written", ", ".join(f"`{name}`" for name in provider.aliases)
    yield "runs on", ", ".join(f"`{name}`" for name in provider.flavours)
    if provider.requirements:
        yield "installs", ", ".join(f"`{name}`" for name in provider.requirements)
    if provider.systems:
        yield "has packages for", ", ".join(_SYSTEMS[name] for name in provider.systems)
    if provider.requirements:
        yield "needs Python", f"{'.'.join(map(str, provider.python))} or newer"
    if provider.needs:
        yield "needs", provider.needs
    yield "`device`", ", ".join(f'`"{device}"`' for device in provider.devices)
    if provider.product == "context":
        yield "`share-weights`", "yes" if provider.shares_weights else "no"
    if provider.virtual_devices:
        yield "`virtual-devices`", "yes"
    yield "fixed shapes", "needed" if provider.static_shapes else "not needed"
    if provider.profiles:
        yield "`profiles`", "yes"
    bounds = provider.tolerance
    yield "tolerance", f"atol {bounds.atol:g}, rtol {bounds.rtol:g}, cosine {bounds.cosine:g}"
    yield "tried", provider.verified
    yield "on the hardware", provider.hardware


def _option(name: str, option: Option) -> str:
    default = f"`{option.default}`" if option.default else ""
    cells = (f"`{name}`", option.allowed, default, _SCOPES[option.scope], option.doc)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write all of them."""
    (FOLDER / "providers.md").write_text(providers(), encoding="utf-8", newline="\n")
    schema.FILE.write_text(schema.text(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
