"""The MXFP8 tensor: E4M3 codes with one power-of-two scale for every 32, and how gradients pass through it.

Gradients, for this and every op that makes or takes an `MXFP8Tensor`. An fp8 array would round its cotangent to fp8
(1000 becomes NaN, 1e-4 becomes 0), and a uint8 one has no cotangent at all. So a tensor carries a `proxy`: an array of
the logical dtype that nothing reads, made from the codes (`make_proxy`), which exists to have a cotangent.

- Who makes a tensor: its forward rule returns it with a proxy; its backward rule takes the proxy's cotangent for the
  cotangent of the values that were rounded, and ignores the rest.
- Who takes one: its forward rule reads the codes and saves `saved(t)`, which has no proxy; its backward rule returns
  `cotangent(saved, gradient)`, the gradient on the proxy.

Under jit XLA removes the proxy. `MXFP8Tensor.detach` drops it from what leaves jit or needs no gradient.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_mla import checks, sharding
from jax_mla.coded import COPIES, Coded, of_gradient, static_field
from jax_mla.mxfp8_bits import BLOCK, CODES

DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP8Tensor(Coded):
    """A tensor [..., T, ..., K] as E4M3 codes and E8M0 scales: value = code * 2^(scale - 127), NaN where scale is 255.

    rowwise_codes: float8_e4m3fn, the tensor's shape and order; rowwise_scales: uint8 [..., T, ..., K/32], one for 32
    neighbours along the last axis. columnwise_codes: the same shape; columnwise_scales: uint8 [..., T/32, ..., K], one
    for 32 neighbours along `token_axis`. Either pair may be None. dtype: the logical dtype, that of the values before
    quantisation and of their gradients. token_axis: negative, so that vmap and scan keep its meaning. proxy: carries
    the gradient (this file's docstring); None in a tensor that needs none.

    A pytree (dtype and token_axis are static) for jit, scan, vmap and remat; immutable. Codes carry no gradient of
    their own: differentiate through `dequantize` or the ops that take tensors.
    """

    rowwise_codes: jax.Array | None
    rowwise_scales: jax.Array | None
    columnwise_codes: jax.Array | None
    columnwise_scales: jax.Array | None
    dtype: np.dtype = static_field()
    token_axis: int = static_field()
    proxy: jax.Array | None = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", check_dtype("dtype", self.dtype))
        object.__setattr__(self, "token_axis", check_token_axis(self.token_axis))

    codes_dtype = CODES

    @property
    def shape(self) -> tuple[int, ...]:
        codes = self.rowwise_codes if self.columnwise_codes is None else self.columnwise_codes
        if codes is None:
            raise ValueError("shape: found an MXFP8Tensor without codes, wanted a row-wise or column-wise copy")
        return tuple(codes.shape)

    def copy(self, usage: str) -> tuple[jax.Array, jax.Array]:
        """Codes (as float8_e4m3fn) and scales of one copy. ValueError naming the usage if the tensor lacks it."""
        return self.codes(usage), getattr(self, f"{usage}_scales")

    def only(self, usage: str) -> "MXFP8Tensor":
        """The tensor with one of its copies (what wgrad saves is the column-wise one). ValueError if it lacks it."""
        self.codes(usage)
        (other,) = (name for name in COPIES if name != usage)
        return dataclasses.replace(self, **{f"{other}_codes": None, f"{other}_scales": None})

    @classmethod
    def from_te(cls, tensor) -> "MXFP8Tensor":
        """The tensor with the bits of a ScaledTensor1x or ScaledTensor2x of Transformer Engine's: `te.from_te`."""
        from jax_mla import te  # which imports this file

        return te.from_te(tensor)

    def to_te(self, quantize=None):
        """Transformer Engine's tensor with the bits of this one, without gradients: `te.to_te`."""
        from jax_mla import te

        return te.to_te(self, quantize)

    def __repr__(self) -> str:
        codes = self.rowwise_codes if self.columnwise_codes is None else self.columnwise_codes
        shape = list(codes.shape) if hasattr(codes, "shape") else "[?]"  # jax.tree functions may put anything here
        return f"MXFP8Tensor({self.dtype}{shape}, {' and '.join(self.usages) or 'empty'}, token_axis={self.token_axis})"


jax.export.register_pytree_node_serialization(
    MXFP8Tensor,
    serialized_name="jax_mla.MXFP8Tensor",
    serialize_auxdata=lambda static: f"{static[0]} {static[1]}".encode(),
    deserialize_auxdata=lambda text: (np.dtype(text.split()[0].decode()), int(text.split()[1])),
)


def check_dtype(argument: str, dtype) -> np.dtype:
    dtype = checks.dtype(argument, dtype, narrow=True)
    if dtype not in DTYPES:
        raise TypeError(f"{argument}: found dtype {dtype}, wanted bfloat16, float16 or float32")
    return dtype


def check_token_axis(axis: int) -> int:
    axis = checks.static_int("token_axis", axis, -1000)
    if axis > -2:
        raise checks.found("token_axis", axis, "-2 or less: counted from the end, and not the last axis")
    return axis


def check(argument: str, t: MXFP8Tensor, *usages: str) -> None:
    """Raises TypeError or ValueError, naming the argument, unless t is a well-formed tensor with these copies."""
    if not isinstance(t, MXFP8Tensor):
        raise TypeError(f"{argument}: found {checks.show(t)}, wanted an MXFP8Tensor")
    if not t.usages:
        raise ValueError(f"{argument}: found an MXFP8Tensor without codes, wanted a row-wise or column-wise copy")
    for usage in usages:
        if usage not in t.usages:
            raise checks.found(argument, t, f"an MXFP8Tensor with a {usage} copy (found only {t.usages[0]})")
    if t.proxy is not None and (getattr(t.proxy, "dtype", None) != t.dtype or t.proxy.shape != t.shape):
        raise checks.found(f"{argument}.proxy", t.proxy, f"None or {t.dtype}{list(t.shape)}")
    for usage in t.usages:
        codes, scales = getattr(t, f"{usage}_codes"), getattr(t, f"{usage}_scales")
        if codes.dtype not in (CODES, jnp.uint8) or codes.shape != t.shape:
            raise checks.found(f"{argument}.{usage}_codes", codes, f"float8_e4m3fn (or its bytes) {list(t.shape)}")
        axis = blocked_axis(argument, t, usage, t.token_axis)
        wanted = list(t.shape)
        wanted[axis] //= BLOCK
        if scales is None or scales.dtype != jnp.uint8 or list(scales.shape) != wanted:
            raise checks.found(f"{argument}.{usage}_scales", scales, f"uint8{wanted}")


def blocked_axis(argument: str, x: jax.Array | MXFP8Tensor, usage: str, token_axis: int) -> int:
    """The axis that a copy's blocks run along. ValueError unless it is there and a multiple of 32 on every device."""
    axis = -1 if usage == "rowwise" else token_axis
    if x.ndim < -axis:
        raise checks.found(argument, x, f"at least {-axis} dims ({usage} blocks along axis {axis})")
    array = x if not isinstance(x, MXFP8Tensor) else getattr(x, f"{usage}_codes")
    size, names = x.shape[axis], sharding.spec(array)[axis]
    parts = math.prod(jax.typeof(array).sharding.mesh.shape[name] for name in names)
    if size % (BLOCK * parts):
        share = f", {size // parts} on each device of mesh axes {names}" if parts > 1 else ""
        raise ValueError(
            f"{argument}: found axis {axis} of size {size}{share}, wanted a multiple of {BLOCK} for {usage} blocks"
        )
    return axis


def make_proxy(codes: jax.Array, dtype: np.dtype) -> jax.Array:
    """From the codes, not zeros: it varies over devices and vmap as they do. (An unbatched proxy of batched codes
    would add up the whole batch's gradients.)"""
    return codes.astype(dtype)


def once_differentiable(op: str, function):
    """`function`, arithmetic on bits, whose derivative would be silently 0: whoever differentiates the rules that call
    it (second derivatives, forward mode over reverse) gets an error."""

    @jax.custom_jvp
    def run(*arrays):
        return function(*arrays)

    @run.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(f"{op}: found a second derivative through quantised values, wanted the first alone")

    return run


class Saved(NamedTuple):
    """What an op that takes a tensor keeps of it for its backward rule."""

    tensor: Coded  # without proxy, codes as bytes: scan stacks residuals
    differentiable: tuple | None  # () if it came with a proxy: a structure, so that it is known at trace time


def saved(t: Coded) -> Saved:
    return Saved(t.detach().bytes(), None if t.proxy is None else ())


def cotangent(kept: Saved, gradient: jax.Array) -> Coded:
    """The cotangent of the tensor that `saved` was given: `gradient` on its proxy, in its logical dtype."""
    t = kept.tensor
    proxy = None
    if kept.differentiable is not None:  # `like` is read for its type only
        like = make_proxy(t.placed(), t.dtype)
        proxy = sharding.cotangent(gradient, like)
    return of_gradient(t.shell, proxy)
