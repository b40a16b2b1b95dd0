"""Dense contraction with the gradients that mixed precision wants: a float32 weight gets a float32 gradient that was
never rounded to the activation's dtype."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_mla import checks, sharding
from jax_mla.rope import wide

_LETTERS = "abcdefgijklmnopqstuvwxyz"


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, contract: int = 1) -> jax.Array:
    """y = x . w + bias, contracting the last `contract` dims of x with the first of w.

    x: floating [..., *C]; w: floating [*C, *O]; bias: floating [*O] or None. Computed in x's dtype (w is cast to it,
    accumulation is float32); returned in it, [..., *O]. Saved for the backward pass: the arguments. dW and dbias
    come from float32 accumulators in their parameter's dtype. Under a mesh the bias is added after any sum over it.

    Raises ValueError or TypeError naming the argument.
    """
    if w.ndim <= contract or x.ndim < contract or x.shape[x.ndim - contract :] != w.shape[:contract]:
        raise checks.found("w", w, f"an array whose first {contract} dims are the last of x, which is {checks.show(x)}")
    checks.floating("x", x)
    checks.floating("w", w)
    if bias is not None:
        checks.floating("bias", bias)
        if bias.shape != w.shape[contract:]:
            raise checks.found("bias", bias, f"shape {list(w.shape[contract:])}")
    return _linear(contract, x, w, bias)


def multiply(x: jax.Array, w: jax.Array, contract: int = 1) -> jax.Array:
    """The product in x's dtype, without a derivative of its own."""
    rows, inner, outer = _letters(x, w, contract)
    return sharding.einsum(f"{rows}{inner},{inner}{outer}->{rows}{outer}", x, w.astype(x.dtype), x.dtype)


def input_cotangent(dy: jax.Array, w: jax.Array, x: jax.Array, contract: int = 1) -> jax.Array:
    """dx = dy . w^T, in x's dtype."""
    rows, inner, outer = _letters(x, w, contract)
    dx = sharding.einsum(f"{rows}{outer},{inner}{outer}->{rows}{inner}", dy, w.astype(dy.dtype), dy.dtype)
    return sharding.cotangent(dx, x)


def weight_cotangent(x: jax.Array, dy: jax.Array, w: jax.Array, contract: int = 1) -> jax.Array:
    """dW = x^T . dy, from the float32 accumulator in w's dtype, summed once over devices that hold copies of w."""
    rows, inner, outer = _letters(x, w, contract)
    across = (sharding.varying(x) | sharding.varying(dy)) - sharding.varying(w)
    # Partial sums that are still to be added up stay in float32; else the GEMM writes w's dtype and nothing wider.
    dtype = jnp.promote_types(x.dtype, jnp.float32 if across else w.dtype)
    return sharding.cotangent(sharding.einsum(f"{rows}{inner},{rows}{outer}->{inner}{outer}", x, dy, dtype, like=w), w)


def bias_cotangent(dy: jax.Array, bias: jax.Array) -> jax.Array:
    """dbias: dy summed over its leading dims in float32, in bias's dtype."""
    rows = " ".join(f"t{i}" for i in range(dy.ndim - bias.ndim))
    outer = " ".join(f"o{i}" for i in range(bias.ndim))
    axes = tuple(range(dy.ndim - bias.ndim))
    total = sharding.local("bias", f"{rows} {outer} -> {outer}", lambda dy: jnp.sum(wide(dy), axis=axes), dy)
    return sharding.cotangent(total, bias)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y + bias in float32, rounded to y's dtype."""
    if bias is None:
        return y
    rows = " ".join(f"t{i}" for i in range(y.ndim - bias.ndim))
    outer = " ".join(f"o{i}" for i in range(bias.ndim))
    rule = f"{rows} {outer}, {outer} -> {rows} {outer}"
    return sharding.local("bias", rule, lambda y, b: (wide(y) + wide(b)).astype(y.dtype), y, sharding.follow(bias, y))


def _letters(x: jax.Array, w: jax.Array, contract: int) -> tuple[str, str, str]:
    inner, outer = _LETTERS[:contract], _LETTERS[contract : w.ndim]
    return _LETTERS[w.ndim : w.ndim + x.ndim - contract], inner, outer


class _Residuals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(contract: int, x, w, bias):
    return add_bias(multiply(x, w, contract), bias)


def _linear_fwd(contract: int, x, w, bias):
    return add_bias(multiply(x, w, contract), bias), _Residuals(x, w, bias)


def _linear_bwd(contract: int, saved: _Residuals, dy):
    x, w, bias = saved
    return (
        input_cotangent(dy, w, x, contract),
        weight_cotangent(x, dy, w, contract),
        None if bias is None else bias_cotangent(dy, bias),
    )


_linear.defvjp(_linear_fwd, _linear_bwd)
