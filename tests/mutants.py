"""Mutated ONNX files: small real models with damage that a seed chooses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message

from tests import models
from tests.hostile import context
from tests.models import parsed

_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**63), 10**9)
_FLOATS = (0.0, -1.5, float("nan"), float("inf"), 1e300)
_TEXTS = ("", "x", "a\0b", "\x1b[31m", "../up", "/etc/passwd", "a\nb", "y" * 300, "EPContext", "-1")


def sources() -> dict[str, onnx.ModelProto]:
    """The models that are mutated, by name."""
    return {
        "network": models.network(),
        "ranges": _ranges(),
        "branching": _branching(),
        "function": _function(),
        "external": _external(),
        "context": context(embed_mode=1, ep_cache_context="blob"),
        "initializers among the inputs": models.initializer_among_the_inputs(),
    }


def mutants(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """``count`` mutated files with the names of their models and of what was done to them.

    Each depends on the seed and its own number only.
    """
    made = list(sources().items())
    for number in range(count):
        # Any two numbers choose differently.
        chance = random.Random(f"{seed}-{number}")
        name, source = chance.choice(made)
        ways = chance.choices(_WAYS, (3, 1, 1, 1, 4), k=chance.choice((1, 1, 1, 2, 4)))
        content = source.SerializeToString()
        for way in ways:
            content = way(content, chance)
        yield f"{name}: {', '.join(way.__name__.strip('_') for way in ways)}", content


def _flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8)) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(content: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:start] if chance.random() < 0.5 else content[:start] + content[end:]


def _doubled(content: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:end] + content[start:]


def _swapped(content: bytes, chance: random.Random) -> bytes:
    one, two, three = sorted(chance.randrange(len(content) + 1) for _ in range(3))
    return content[:one] + content[two:three] + content[one:two] + content[three:]


def _changed_fields(content: bytes, chance: random.Random) -> bytes:
    """``content`` with other values, kinds or numbers of fields: it is protobuf as before."""
    try:
        model = onnx.ModelProto.FromString(content)
        for _ in range(chance.choice((1, 1, 2, 3))):
            messages = list(_messages(model))
            _change(chance.choice(messages), chance)
        return bytes(model.SerializeToString())
    except Exception:
        # It was no protobuf any more, or cannot be written again.
        return content


_WAYS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flipped,
    _cut,
    _doubled,
    _swapped,
    _changed_fields,
)


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, given in message.ListFields():
        if field.message_type is not None:
            for each in given if field.is_repeated else [given]:
                yield from _messages(each)


def _change(message: Message, chance: random.Random) -> None:
    field: Any = chance.choice(list(message.DESCRIPTOR.fields))
    if field.is_repeated:
        _change_list(getattr(message, field.name), field, chance)
    elif chance.random() < 0.2:
        message.ClearField(field.name)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _value(field, chance))


def _change_list(items: Any, field: Any, chance: random.Random) -> None:
    way = chance.randrange(3)
    if items and way == 0:
        del items[chance.randrange(len(items))]
    elif items and way == 1:
        items.append(items[chance.randrange(len(items))])
    elif field.message_type is not None:
        items.add()
    else:
        items.append(_value(field, chance))


def _value(field: Any, chance: random.Random) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        text = chance.choice(_TEXTS)
        return text.encode() + b"\xff" if field.type == field.TYPE_BYTES else text
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return chance.choice(_FLOATS)
    if field.cpp_type == field.CPPTYPE_ENUM:
        return chance.choice(field.enum_type.values).number
    bits = 32 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
    number = chance.choice(_NUMBERS)
    if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        return number % 2**bits
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def _ranges() -> onnx.ModelProto:
    """Inputs that choose from stored tables, in all ways that bounds are found."""
    return parsed(
        """(int32[2, 1] i, int64[2] j) => (float[2, 5] y, float[2, 9] z, float[2, 3] r)
        <int64 depth = {9}, float[2] values = {0, 1}> {
            is = Equal (range, i)
            y = Cast <to = 1> (is)
            z = OneHot (j, depth, values)
            r = Gather <axis = 0> (table, j) }""",
        range=np.arange(5, dtype=np.int32),
        table=(7, 3),
    )


def _branching() -> onnx.ModelProto:
    return parsed("""(float[2] x, bool c) => (float[2] y) { [if] y = If (c) <
        then_branch = then () => (float[2] t) <float[2] one = {1, -1}> { [add] t = Add (x, one) },
        else_branch = other () => (float[2] e) { [relu] e = Relu (x) }> }""")


def _function() -> onnx.ModelProto:
    return parsed("""(float[2] x) => (float[2] y) { y = our.own.twice (x) }
        <domain: "our.own", opset_import: ["" : 17]> twice (a) => (b) { b = Add (a, a) }""")


def _external() -> onnx.ModelProto:
    made = models.network()
    for tensor in made.graph.initializer:
        size = len(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, "w.bin", offset=0, length=size)
        tensor.ClearField("raw_data")
    return made
