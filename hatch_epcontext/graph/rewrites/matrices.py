"""What is linear with fixed sizes as products with stored matrices: Resize, DFT and Col2Im."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import MAX_VALUES, Builder, Outputs
from hatch_epcontext.graph.dtypes import Numbers
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewrites.matching import spatial
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope


@dataclass(frozen=True)
class _Resized:
    """A Resize along one axis: ``size`` values become ``result``; ``start`` and ``end`` are the region's."""

    node: onnx.NodeProto
    size: int
    result: int
    scale: float
    start: float
    end: float

    @property
    def positions(self) -> Numbers:
        """The position of each result in the source."""
        at, last = np.arange(self.result, dtype=np.float64), self.size - 1
        mode = graph.text(self.node, "coordinate_transformation_mode") or "half_pixel"
        if mode == "asymmetric" or self.node.op_type == "Upsample":
            return at / self.scale
        if mode == "align_corners":
            return at * (last / (self.result - 1) if self.result > 1 else 0)
        if mode == "tf_crop_and_resize":
            if self.result == 1:
                return np.array([0.5 * (self.start + self.end) * last])
            return self.start * last + at * (self.end - self.start) * last / (self.result - 1)
        if mode == "pytorch_half_pixel" and self.result == 1:
            return np.zeros(1)
        shift = 0.0
        if mode == "half_pixel_symmetric":
            shift = self.size / 2 * (1 - self.result / (self.scale * self.size))
        return shift + (at + 0.5) / self.scale - 0.5

    @property
    def is_outside(self) -> NDArray[np.bool_]:
        """Whether each result is beyond the source."""
        outside = (self.positions < 0) | (self.positions > self.size - 1)
        mode = graph.text(self.node, "coordinate_transformation_mode")
        return np.asarray(outside & (mode == "tf_crop_and_resize"))

    @property
    def nearest(self) -> NDArray[np.int64]:
        """The number of the source's value for each result."""
        mode, positions = graph.text(self.node, "nearest_mode"), self.positions
        rounded = {
            "floor": np.floor(positions),
            "ceil": np.ceil(positions),
            "round_prefer_ceil": np.floor(positions + 0.5),
        }.get(mode, np.ceil(positions - 0.5))
        if self.node.op_type == "Upsample" or _is_first(self.node):
            rounded = np.floor(positions)
        return rounded.clip(0, self.size - 1).astype(np.int64)

    def matrix(self) -> Numbers:
        """The weights of the source's values (columns) for each result (rows)."""
        is_cubic = graph.text(self.node, "mode") == "cubic"
        antialias = bool(graph.number(self.node, "antialias", 0))
        a = graph.attribute(self.node, "cubic_coeff_a", -0.75)
        narrow = min(self.scale, 1.0) if antialias else 1.0
        reach = math.ceil((2 if is_cubic else 1) / narrow) + 1
        positions = self.positions[:, None]
        columns = np.floor(positions) + np.arange(-reach, reach + 1)
        distance = np.abs(columns - positions) * narrow
        weights = _cubic(distance, a) if is_cubic else np.clip(1 - distance, 0, None)
        excludes = bool(graph.number(self.node, "exclude_outside", 0))
        if excludes:
            weights[(columns < 0) | (columns >= self.size)] = 0
        if excludes or antialias:
            weights /= weights.sum(axis=1, keepdims=True)
        result = np.zeros((self.result, self.size))
        nearest = columns.clip(0, self.size - 1).astype(np.int64)
        np.add.at(result, (np.arange(self.result)[:, None], nearest), weights)
        result[self.is_outside] = 0
        return result


def _is_first(node: onnx.NodeProto) -> bool:
    """Whether ``node`` is a Resize of opset 10, which has two inputs and rounds down."""
    return len(node.input) == 2


def _cubic(distance: Numbers, a: float) -> Numbers:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance < 1, near, np.where(distance < 2, far, 0.0))


@rewrites("Resize", "Upsample")
def resize_as_matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A Resize as a product with a matrix for each axis, or as Gathers of the nearest values."""
    value = node.input[0]
    shape, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    parts = _resized_axes(node, shape, result, scope)
    if parts is None:
        return Declined("its scales or its region are computed")
    is_nearest = (graph.text(node, "mode") or "nearest") == "nearest"
    if not is_nearest and builder.dtype.kind != "f":
        return Declined(f"it resizes {builder.dtype}")
    sizes = [*shape]
    outside = np.zeros(result, bool)
    for axis, part in parts.items():
        wide = [1] * len(shape)
        wide[axis] = part.result
        outside |= part.is_outside.reshape(wide)
        if is_nearest:
            value = builder.add("Gather", value, builder.store(part.nearest), axis=axis)
        elif part.result * part.size > MAX_VALUES:
            return Declined(f"its matrix has {part.result * part.size:,} values")
        else:
            matrix = part.matrix().astype(builder.dtype)
            value = _times(builder.store(matrix), value, sizes, axis, part.result, builder)
        sizes[axis] = part.result
    if outside.any():
        filler = builder.number(graph.attribute(node, "extrapolation_value", 0.0))
        value = builder.add("Where", builder.store(outside), filler, value)
    return [value]


def _resized_axes(
    node: onnx.NodeProto, shape: Sequence[int], result: Sequence[int], scope: Scope
) -> Mapping[int, _Resized] | None:
    """Each axis that a Resize changes."""
    rank = len(shape)
    axes = [axis % rank for axis in graph.attribute(node, "axes", range(rank))]
    is_old = _is_first(node)
    roi, scales, given = ("", node.input[1], "") if is_old else graph.operands(node, 4)[1:]
    regions, factors, wanted = (
        scope.constant(name) if name else None for name in (roi, scales, given)
    )
    if (scales and factors is None) or (given and wanted is None):
        return None
    is_crop = graph.text(node, "coordinate_transformation_mode") == "tf_crop_and_resize"
    if is_crop and regions is None:
        return None
    policy = graph.text(node, "keep_aspect_ratio_policy")
    common = None
    if wanted is not None and wanted.size and policy in ("not_larger", "not_smaller"):
        ratios = [wanted[index] / shape[axis] for index, axis in enumerate(axes)]
        common = min(ratios) if policy == "not_larger" else max(ratios)
    parts = {}
    for index, axis in enumerate(axes):
        scale = result[axis] / shape[axis]
        if factors is not None and factors.size:
            scale = float(factors[index])
        start, end = (0.0, 1.0)
        if is_crop and regions is not None:
            start, end = float(regions[index]), float(regions[index + len(axes)])
        part = _Resized(node, shape[axis], result[axis], common or scale, start, end)
        if scale != 1 or part.result != part.size or (start, end) != (0.0, 1.0):
            parts[axis] = part
    return parts


def _times(
    matrix: str, value: str, shape: Sequence[int], axis: int, result: int, builder: Builder
) -> str:
    """The product of ``matrix`` and ``value`` along ``axis``, which gets the size ``result``."""
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    value = builder.reshape(value, [before, shape[axis], after])
    value = builder.add("MatMul", matrix, value)
    return builder.reshape(value, [*shape[:axis], result, *shape[axis + 1 :]])


@rewrites("DFT")
def dft_as_matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A discrete Fourier transform as a product with sines and cosines."""
    value, length_name, axis_name = graph.operands(node, 3)
    shape, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    length = scope.stored_values(length_name) if length_name else None
    axis = scope.stored_values(axis_name) if axis_name else None
    rank, default = len(shape), graph.number(node, "axis", 1) if builder.opset < 20 else -2
    at = int(default if axis is None else axis.item()) % rank
    inverse, onesided = (bool(graph.number(node, name, 0)) for name in ("inverse", "onesided"))
    size, parts = shape[at], shape[-1]
    count = int(length.item()) if length is not None else size
    if inverse and onesided and length is None:
        count = 2 * (size - 1)
    if (values := size * parts * result[at] * result[-1]) > MAX_VALUES:
        return Declined(f"its matrix has {values:,} values")
    matrix = _fourier(
        size, parts, count, result[at], result[-1], inverse=inverse, onesided=onesided
    )
    order = [*(axis for axis in range(rank) if axis not in (at, rank - 1)), at, rank - 1]
    value = builder.transpose(value, order)
    rows = math.prod(shape[index] for index in order[:-2])
    stored = builder.store(np.ascontiguousarray(matrix.T).astype(builder.dtype))
    value = _times(stored, value, [rows, size * parts], 1, matrix.shape[1], builder)
    value = builder.reshape(value, [*(shape[axis] for axis in order[:-2]), result[at], result[-1]])
    return [builder.transpose(value, np.argsort(order).tolist())]


def _fourier(
    size: int, parts: int, count: int, rows: int, results: int, *, inverse: bool, onesided: bool
) -> Numbers:
    """The matrix from ``size`` values of ``parts`` (1: real) to ``rows`` values of ``results`` parts."""
    is_half = inverse and onesided
    units = np.eye(size, size if is_half else count)[:, None] * np.array([[1], [1j]])[:parts]
    values = np.fft.ifft(units) if inverse else np.fft.fft(units)
    if is_half:
        values = np.fft.irfft(units, count).astype(complex)
    both = np.stack([values.real, values.imag], -1)
    return both[:, :, :rows, :results].reshape(size * parts, rows * results)


@rewrites("Col2Im")
def col2im_as_matmul(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The sums of overlapping blocks as a product with zeros and ones."""
    value = node.input[0]
    shape, result = scope.fixed_shape(value), scope.fixed_shape(node.output[0])
    image, block = (scope.stored_values(name).tolist() for name in node.input[1:3])
    count, columns, values = len(image), math.prod(block) * shape[2], math.prod(image)
    strides, dilations, pads = spatial(node, count)
    if columns * values > MAX_VALUES:
        return Declined(f"its matrix has {columns * values:,} values")
    # The number of the value in the image for each value of each block; -1 beyond its borders.
    padding = [*zip(pads[:count], pads[count:], strict=True)]
    numbers = np.pad(np.arange(values).reshape(image), padding, constant_values=-1)
    reach = [(size - 1) * dilation + 1 for size, dilation in zip(block, dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(numbers, reach)
    windows = windows[tuple(slice(None, None, stride) for stride in (*strides, *dilations))]
    axes = [*range(count, 2 * count), *range(count)]
    matrix = np.arange(values)[:, None] == windows.transpose(axes).reshape(-1)
    stored = builder.store(matrix.astype(builder.dtype))
    sizes = [result[0] * result[1], columns]
    return [builder.reshape(_times(stored, value, sizes, 1, len(matrix), builder), result)]


@rewrites("ConvTranspose")
def conv_transpose_as_conv(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """The Conv, with its weights reversed, of values with zeros around and between them."""
    value, weights, bias = graph.operands(node, 3)
    shape, kernel, result = map(scope.fixed_shape, (value, weights, node.output[0]))
    count, group = len(shape) - 2, graph.number(node, "group", 1)
    strides, dilations, _ = spatial(node, count)
    before = _pads_before(node, shape, kernel, result)
    sizes = [*shape]
    for index in range(count):
        axis, reach = index + 2, (kernel[index + 2] - 1) * dilations[index]
        matrix = np.zeros((result[axis] + reach, shape[axis]), builder.dtype)
        rows = np.arange(shape[axis]) * strides[index] + reach - before[index]
        inside = (rows >= 0) & (rows < matrix.shape[0])
        matrix[rows[inside], np.arange(shape[axis])[inside]] = 1
        value = _times(builder.store(matrix), value, sizes, axis, matrix.shape[0], builder)
        sizes[axis] = matrix.shape[0]
    for axis in range(2, count + 2):
        backwards = np.arange(kernel[axis])[::-1].copy()
        weights = builder.add("Gather", weights, builder.store(backwards), axis=axis)
    inputs, outputs = kernel[0] // group, kernel[1]
    weights = builder.reshape(weights, [group, inputs, outputs, *kernel[2:]])
    weights = builder.transpose(weights, [0, 2, 1, *range(3, count + 3)])
    weights = builder.reshape(weights, [group * outputs, inputs, *kernel[2:]])
    operands = [value, weights, *([bias] if bias else [])]
    return [
        builder.add("Conv", *operands, dilations=dilations, group=group, kernel_shape=kernel[2:])
    ]


def _pads_before(
    node: onnx.NodeProto, shape: Sequence[int], kernel: Sequence[int], result: Sequence[int]
) -> Sequence[int]:
    """How many of the first results of a ConvTranspose are cut off along each axis."""
    count = len(shape) - 2
    strides, dilations, pads = spatial(node, count)
    extra = graph.attribute(node, "output_padding", [0] * count)
    auto = graph.text(node, "auto_pad")
    if auto not in ("SAME_UPPER", "SAME_LOWER") and not graph.attribute(node, "output_shape", []):
        return pads[:count]
    sizes = zip(shape[2:], strides, kernel[2:], dilations, extra, result[2:], strict=True)
    total = [
        stride * (size - 1) + (width - 1) * dilation + 1 + more - end
        for size, stride, width, dilation, more, end in sizes
    ]
    return [size // 2 if auto == "SAME_UPPER" else size - size // 2 for size in total]
