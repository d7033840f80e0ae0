"""What a message says about open dimensions that have no size."""

from __future__ import annotations

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key, Setting
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.values.kinds import dimension_kind


def open_dimension_message(tensor: TensorFacts, ep: str) -> str:
    """The message about an input with open dimensions, for an EP that needs fixed shapes."""
    return (
        f"the input {tensor.name!r} has an open dimension ({tensor.shape_text}), and {ep} compiles "
        "only fixed shapes."
    )


def place_of_sizes(tensor: TensorFacts, spec: Model) -> Key:
    """The table with the sizes of ``tensor``: ``shapes``, or ``dims`` if all its dimensions have names."""
    return spec.place("shapes" if None in tensor.shape else "dims")


def _is_batch(tensor: TensorFacts, axis: int) -> bool:
    return dimension_kind(tensor, axis, is_state=False) == "batch"


def _open_axes(tensor: TensorFacts) -> list[int]:
    return [axis for axis, size in enumerate(tensor.shape) if not isinstance(size, int)]


def how_to_fix(tensor: TensorFacts) -> str:
    """What to do about the open dimensions of ``tensor``: a sentence."""
    if all(_is_batch(tensor, axis) for axis in _open_axes(tensor)):
        return "Fix it, for example with size 1."
    return "Fix it with the size that the app feeds, such as how wide its images or how long its texts are."


def sizes_to_fix(tensor: TensorFacts, spec: Model) -> list[Setting]:
    """The settings that fix ``tensor``: 1 for what is a batch, and all else is for the user to choose."""
    axes = _open_axes(tensor)
    known = all(_is_batch(tensor, axis) for axis in axes)
    if None in tensor.shape:
        shape = [size if isinstance(size, int) else 1 for size in tensor.shape]
        place = place_of_sizes(tensor, spec)
        return [Setting(place, {tensor.name: shape}) if known else Setting(place / tensor.name)]
    names = {str(tensor.shape[axis]): axis for axis in axes}
    if known:
        return [Setting(place_of_sizes(tensor, spec), dict.fromkeys(names, 1))]
    return [
        Setting(place_of_sizes(tensor, spec) / name, 1 if _is_batch(tensor, axis) else None)
        for name, axis in names.items()
    ]
