"""Argument checks shared by every op: each error names the argument, what was found and what was wanted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def show(value: Any) -> str:
    """How an error message prints what it found: arrays by dtype and shape, anything else (MXFP8 tensors) by repr."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "token_axis"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def found(argument: str, value: Any, wanted: str) -> ValueError:
    """The error for a value that is wrong: to be raised by the caller."""
    return ValueError(f"{argument}: found {show(value)}, wanted {wanted}")


def dims(argument: str, x: jax.Array, letters: str, **sizes: int) -> dict[str, int]:
    """Checks x's rank and dims against letters such as "B T H D" and returns all known sizes.

    A letter already in `sizes` must match; a number is a wanted size; "..." at the front stands for any leading dims.
    """
    if not hasattr(x, "shape") or hasattr(x, "token_axis"):
        what = repr(x) if hasattr(x, "token_axis") else type(x).__name__
        raise TypeError(f"{argument}: found {what}, wanted an array [{', '.join(letters.split())}]")
    names = letters.split()
    open_front = names[0] == "..."
    names = names[open_front:]
    wanted = ", ".join(f"{n}={sizes[n]}" if n in sizes else n for n in names)
    wanted = f"an array [{'..., ' if open_front else ''}{wanted}]"
    if x.ndim < len(names) or (x.ndim != len(names) and not open_front):
        raise found(argument, x, wanted)
    known = dict(sizes)
    for name, size in zip(names, x.shape[x.ndim - len(names) :], strict=True):
        if known.setdefault(name, size) != size:
            raise found(argument, x, wanted)
    return known


def cast(argument: str, x: Any, letters: str, dtype_wanted: Any) -> jax.Array:
    """x in the `dtype` that a module was made with, as it is where that is None."""
    if dtype_wanted is None:
        return x
    dims(argument, x, letters)
    return x.astype(dtype("dtype", dtype_wanted))


def floating(argument: str, x: jax.Array) -> None:
    """bf16, fp16, fp32 or fp64: the dtypes an op computes in. (8-bit floats come as quantised tensors, never bare.)"""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise TypeError(f"{argument}: found dtype {x.dtype}, wanted bfloat16, float16, float32 or float64")


def dtype(argument: str, value: Any, narrow: bool = False) -> np.dtype:
    """value as a dtype that arrays here can have: no array, no unknown name and, unless `narrow` (who asks refuses it
    anyway), no float64 outside x64 mode."""
    try:
        if isinstance(value, jax.Array | np.ndarray):
            raise TypeError
        result = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{argument}: found {show(value)}, wanted a dtype") from None
    if not narrow and jax.dtypes.canonicalize_dtype(result) != result:
        raise TypeError(f"{argument}: found {result}, wanted x64 mode for it, or a narrower dtype")
    return result


def integer(argument: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{argument}: found dtype {x.dtype}, wanted an integer dtype")


def integers(argument: str, x: Any) -> jax.Array:
    """x as a JAX array of integers. ValueError for values that JAX, out of x64 mode, would wrap to 32 bits."""
    if not hasattr(x, "dtype"):
        x = np.asarray(x)
    integer(argument, x)
    array = jnp.asarray(x)
    # In numpy: under jit JAX's array is a tracer, whatever x is.
    if not isinstance(x, jax.Array) and array.dtype != x.dtype and np.any(np.asarray(x).astype(array.dtype) != x):
        raise ValueError(
            f"{argument}: found {x.dtype} values up to {np.max(np.abs(x))}, wanted what {array.dtype} holds"
        )
    return array


def choice(argument: str, value: Any, choices: tuple) -> None:
    if not isinstance(value, str | None) or value not in choices:  # an array is equal to nothing as a whole
        raise found(argument, value, "one of " + ", ".join(map(repr, choices)))


def static_int(argument: str, value: Any, minimum: int) -> int:
    """A Python integer known at trace time."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{argument}: found a traced value, wanted a Python int (it decides shapes)")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{argument}: found {show(value)}, wanted a Python int")
    if value < minimum:
        raise found(argument, value, f"at least {minimum}")
    return int(value)


def static_float(argument: str, value: Any, minimum: float | None = None, exclusive: bool = False) -> float:
    """A finite Python float known at trace time."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{argument}: found a traced value, wanted a Python float (it is a compile-time constant)")
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{argument}: found {show(value)}, wanted a Python float")
    value = float(value)
    if not np.isfinite(value):
        raise found(argument, value, "a finite number")
    if minimum is not None and (value < minimum or (exclusive and value == minimum)):
        raise found(argument, value, f"a number {'above' if exclusive else 'of at least'} {minimum}")
    return value


def static_bool(argument: str, value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{argument}: found a traced value, wanted a Python bool")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{argument}: found {show(value)}, wanted a bool")
    return bool(value)
