"""MXFP8 tensors from and to Transformer Engine's for JAX: the same codes and scales, bit for bit.

Written after the source of Transformer Engine 2.18, transformer_engine/jax/quantize/tensor.py and scaling_modes.py. Its
tensors are read by their fields and made by its own factory, so that only `to_te` ever imports it.

What its scaling mode MXFP8_1D_SCALING has in common with ours: both copies are E4M3 in the tensor's own shape and order
(layout "N"); the row-wise one has a scale for 32 neighbours along the last axis, the column-wise one along axis
`flatten_axis - 1`, the last of those that make the rows where it flattens the tensor to 2D: our `token_axis`. What
differs: scales are float8_e8m0fnu there and uint8 here, and 2.3 to 2.5 kept them padded to its tiles of 128 x 4.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_mla import checks, mxfp8_tensor
from jax_mla.mxfp8_bits import BLOCK, CODES
from jax_mla.mxfp8_tensor import MXFP8Tensor

_MODE = "MXFP8_1D_SCALING"
_SCALES = jnp.dtype(jnp.float8_e8m0fnu)
_FIELDS = ("data", "scale_inv", "scaling_mode", "dq_dtype", "is_colwise", "data_layout", "flatten_axis")
_TILE = (128, 4)  # scales along the axis without blocks, and along the one with them


def from_te(tensor: Any) -> MXFP8Tensor:
    """An `MXFP8Tensor` with the bits of a tensor of Transformer Engine's, and without a proxy, hence without gradients.

    tensor: a ScaledTensor1x (a row-wise or a column-wise copy) or a ScaledTensor2x (both) in MXFP8_1D_SCALING, E4M3,
      layout "N", float8_e8m0fnu scales or their uint8 bits, padded or not; padding is cut off. No grouped tensors.

    Returns dtype = `dq_dtype` and token_axis = `flatten_axis` - 1 - ndim: -2 where the rows are all but the last axis,
    -3 for a weight [R, H, D] with flatten_axis 1.

    Raises TypeError for what is no such tensor and for other dtypes, ValueError for other modes, layouts and shapes,
    naming the field, what was found and what is wanted.
    """
    if not (hasattr(tensor, "rowwise_tensor") and hasattr(tensor, "colwise_tensor")):
        return _copy("tensor", tensor)
    rowwise = _copy("tensor.rowwise_tensor", tensor.rowwise_tensor, colwise=False)
    columnwise = _copy("tensor.colwise_tensor", tensor.colwise_tensor, colwise=True)
    for field, ours in (("data", "shape"), ("dq_dtype", "dtype"), ("flatten_axis", "token_axis")):
        if getattr(columnwise, ours) != getattr(rowwise, ours):
            found = getattr(tensor.colwise_tensor, field)
            wanted = checks.show(getattr(tensor.rowwise_tensor, field))
            raise checks.found(f"tensor.colwise_tensor.{field}", found, f"the row-wise one's, {wanted}")
    return dataclasses.replace(
        rowwise, columnwise_codes=columnwise.columnwise_codes, columnwise_scales=columnwise.columnwise_scales
    )


def to_te(tensor: MXFP8Tensor, quantize: Any = None) -> Any:
    """Transformer Engine's tensor with the bits of ours: the inverse of `from_te`; a proxy is dropped.

    quantize: the module `transformer_engine.jax.quantize`, or what has its `ScaledTensorFactory` and `ScalingMode`; by
      default it is imported here, and an ImportError says if it cannot be.

    Returns what the factory makes: a ScaledTensor2x of a tensor with both copies, else a ScaledTensor1x; scales
    float8_e8m0fnu, unpadded (where a version wants padding it pads them itself), flatten_axis = ndim + token_axis + 1.

    Raises TypeError or ValueError for a malformed tensor, or one that has no axis `token_axis`.
    """
    mxfp8_tensor.check("tensor", tensor)
    if tensor.ndim < -tensor.token_axis:  # a row-wise copy alone does not need that axis; flatten_axis does
        raise checks.found("tensor", tensor, f"at least {-tensor.token_axis} dims, for its token_axis")
    if quantize is None:
        try:
            from transformer_engine.jax import quantize
        except ImportError as reason:
            raise ImportError(
                f"quantize: found no transformer_engine.jax.quantize ({reason}), wanted Transformer Engine installed "
                "with JAX: pip install 'transformer_engine[jax]'"
            ) from reason
    common = {
        "scaling_mode": getattr(quantize.ScalingMode, _MODE),
        "dq_dtype": tensor.dtype,
        "flatten_axis": tensor.ndim + tensor.token_axis + 1,
    }
    arrays = {}
    for usage in tensor.usages:
        codes, scales = tensor.copy(usage)
        arrays[usage] = codes, jax.lax.bitcast_convert_type(scales, _SCALES)
    if len(arrays) == 2:
        (data, scale_inv), (colwise_data, colwise_scale_inv) = arrays["rowwise"], arrays["columnwise"]
        return quantize.ScaledTensorFactory.create_2x(
            data, scale_inv, colwise_data, colwise_scale_inv, data_layout="NN", **common
        )
    ((usage, (data, scale_inv)),) = arrays.items()
    colwise = usage == "columnwise"
    return quantize.ScaledTensorFactory.create_1x(data, scale_inv, is_colwise=colwise, data_layout="N", **common)


def _copy(name: str, tensor: Any, colwise: bool | None = None) -> MXFP8Tensor:
    """The tensor of one copy. name: of the ScaledTensor1x, for errors; colwise: which copy it has to be."""
    kind = type(tensor).__name__
    if missing := [field for field in _FIELDS if not hasattr(tensor, field)]:
        wanted = "a ScaledTensor1x or ScaledTensor2x of Transformer Engine"
        raise TypeError(f"{name}: found {kind} without {', '.join(missing)}, wanted {wanted}")
    if hasattr(tensor, "original_shape"):
        raise TypeError(f"{name}: found {kind}, a grouped tensor, wanted a ScaledTensor1x or ScaledTensor2x")
    mode = getattr(tensor.scaling_mode, "name", tensor.scaling_mode)
    if mode != _MODE:
        raise ValueError(f"{name}.scaling_mode: found {mode}, wanted {_MODE}")
    if tensor.data_layout != "N":
        raise checks.found(f"{name}.data_layout", tensor.data_layout, "'N'")
    if colwise is not None and bool(tensor.is_colwise) != colwise:
        raise checks.found(f"{name}.is_colwise", tensor.is_colwise, f"{colwise}")
    if getattr(tensor, "has_rht_applied", False):  # 2.9 and later have the field
        raise checks.found(f"{name}.has_rht_applied", True, "False: codes of the values themselves")
    codes = _array(f"{name}.data", tensor.data, CODES)
    flatten_axis = checks.static_int(f"{name}.flatten_axis", tensor.flatten_axis, 1)
    if flatten_axis >= codes.ndim:
        raise checks.found(f"{name}.flatten_axis", flatten_axis, f"less than the {codes.ndim} dims of data")
    dtype, token_axis = mxfp8_tensor.check_dtype(f"{name}.dq_dtype", tensor.dq_dtype), flatten_axis - 1 - codes.ndim
    usage = "columnwise" if tensor.is_colwise else "rowwise"
    axis = mxfp8_tensor.blocked_axis(f"{name}.data", codes, usage, token_axis)
    shape = list(codes.shape)
    shape[axis] //= BLOCK
    scales = _array(f"{name}.scale_inv", tensor.scale_inv, _SCALES, jnp.dtype(jnp.uint8))
    padded = _padded(shape, flatten_axis, _TILE[::-1] if tensor.is_colwise else _TILE)
    if list(scales.shape) not in (shape, padded):
        either = f" or, padded, {padded}" if padded not in (None, shape) else ""
        raise checks.found(f"{name}.scale_inv", scales, f"shape {shape}{either}")
    if list(scales.shape) != shape:
        scales = scales[tuple(map(slice, shape))]
    if scales.dtype != jnp.uint8:
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    none = (None, None)
    pairs = (*none, codes, scales) if tensor.is_colwise else (codes, scales, *none)
    return MXFP8Tensor(*pairs, dtype, token_axis)


def _array(name: str, value: Any, *dtypes) -> jax.Array:
    if getattr(value, "dtype", None) not in dtypes:
        raise TypeError(f"{name}: found {checks.show(value)}, wanted {' or '.join(map(str, dtypes))}")
    return jnp.asarray(value)


def _padded(shape: list[int], flatten_axis: int, tile: tuple[int, int]) -> list[int] | None:
    """The scales' shape with rows and columns, as flattened at flatten_axis, in whole tiles: Transformer Engine has the
    first axis of either take up the padding. None where that does not divide, and where it has no padded shape."""
    padded = []
    for dims, multiple in zip((shape[:flatten_axis], shape[flatten_axis:]), tile, strict=True):
        size, rest = -(-math.prod(dims) // multiple) * multiple, math.prod(dims[1:])
        if rest == 0 or size % rest:
            return None
        padded += [size // rest, *dims[1:]]
    return padded
