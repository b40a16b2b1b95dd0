"""To FP8 with one scale a tensor: `quantize_fp8`, gradients straight through the rounding.

Source: Transformer Engine's Float8CurrentScaling; the arithmetic is in `fp8_bits.py`, the tensor in `fp8_tensor.py`.
"""

import dataclasses
import functools
import importlib.metadata
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import checks, dispatch, fp8_bits, launches, sharding
from jax_mla.coded import COPIES
from jax_mla.fp8_tensor import FP8Tensor, restored, transposed
from jax_mla.mxfp8_tensor import check_dtype, check_token_axis, make_proxy, once_differentiable

USAGES = (*COPIES, "both")


def quantize_fp8(
    x: jax.Array,
    *,
    usage: str = "rowwise",
    token_axis: int = -2,
    format: str = "e4m3",
    power_of_two: bool = False,
    implementation: dispatch.Choice = None,
) -> FP8Tensor:
    """x as FP8 codes with one scale: code = cast(x * scale), scale = 448 (e5m2: 57344) / amax, amax = max |x|.

    x: bfloat16, float16 or float32 [..., T, ..., K]. usage: "rowwise" (as x lies), "columnwise" (the dims after
    `token_axis` in front) or "both", in one read. token_axis: -2, or -3 for [..., T, H, D]. format: "e4m3" or "e5m2".
    power_of_two: the scale rounded down to one. As Transformer Engine: codes round to nearest even and saturate; NaN
    counts for nothing in amax, and is NaN; the scale is 1 where amax is 0 or infinite (infinities become the largest
    code), and the largest float32 where it would be larger.

    Returns an `FP8Tensor` of x's shape and dtype. Backward: straight through, dx is the proxy's cotangent, never
    rounded to fp8; nothing is saved. Under a mesh amax is that of the whole tensor: a max over the axes x is spread
    over.

    Raises TypeError for another dtype (float64 too); ValueError naming the argument; NotImplementedError if no
    implementation fits.
    """
    return _quantize(static_of("x", x, usage, token_axis, format, power_of_two, implementation), x)


@dataclasses.dataclass(frozen=True)
class Static:
    usage: str
    token_axis: int
    format: str
    power_of_two: bool
    dtype: np.dtype  # the tensor's logical dtype; what is quantised may be wider
    implementation: dispatch.Choice

    @property
    def usages(self) -> tuple[str, ...]:
        return COPIES if self.usage == "both" else (self.usage,)


def static_of(argument: str, x, usage, token_axis, format, power_of_two, implementation: dispatch.Choice) -> Static:
    checks.dims(argument, x, "... K")
    dtype = check_dtype(argument, x.dtype)
    checks.choice("usage", usage, USAGES)
    checks.choice("format", format, tuple(fp8_bits.CODES))
    token_axis = check_token_axis(token_axis)
    if x.ndim < -token_axis:
        raise checks.found(argument, x, f"at least {-token_axis} dims (token_axis={token_axis})")
    power_of_two = checks.static_bool("power_of_two", power_of_two)
    return Static(usage, token_axis, format, power_of_two, dtype, dispatch.check(implementation))


@functools.partial(jax.jit, static_argnums=0, inline=True)  # outside jit: one program
def _xla_quantize(static: Static, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
    """Codes of each usage; scale [1]."""
    codes = fp8_bits.encode(x, scale[0], static.format)
    return tuple(codes if usage == "rowwise" else transposed(codes, static.token_axis) for usage in static.usages)


# Releases of Triton whose compiled kernels were seen, bit for bit, to transpose codes right: kernels/fp8.py tells what
# went wrong.
_SEEN = ("3.6.",)


def transposes(dtype: np.dtype) -> bool:
    """Whether kernels are trusted to write codes of such an array transposed."""
    return dtype.itemsize == 2 and importlib.metadata.version("triton").startswith(_SEEN)


@launches.batched("data", "data")
def _triton_quantize(static: Static, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
    """scale [..., 1]: with the dims that vmap has put in front of x's."""
    from jax_mla.ffi import triton
    from jax_mla.kernels import fp8 as kernels

    batch, split = x.shape[: scale.ndim - 1], x.ndim + static.token_axis + 1
    rows, columns = x.shape[len(batch) : split], x.shape[split:]
    shapes = {"rowwise": x.shape, "columnwise": (*batch, *columns, *rows)}
    dtype = fp8_bits.CODES[static.format]
    if x.size == 0:
        return tuple(jnp.zeros(shapes[usage], dtype) for usage in static.usages)
    sizes = math.prod(batch), math.prod(rows), math.prod(columns)
    # Where no kernel transposes, XLA transposes codes.
    turns = transposes(x.dtype) or static.usage == "rowwise"
    settings = static.usage if turns else "rowwise", x.dtype.name, static.format, triton.compute_capability()
    codes = triton.call(kernels.quantize(*sizes, *settings), x.reshape(sizes), scale.reshape(-1))
    if not turns:
        both = {"rowwise": codes[0], "columnwise": jnp.swapaxes(codes[0], 1, 2)}
        codes = [both[usage] for usage in static.usages]
    codes = (c.reshape(shapes[usage]) for c, usage in zip(codes, static.usages, strict=True))
    return tuple(jax.lax.bitcast_convert_type(c, dtype) for c in codes)


def _straight_through(static: Static, gradient: jax.Array) -> jax.Array:
    return gradient


def _triton_supports(static: Static | None = None, *arrays: jax.Array) -> str | None:
    return launches.supports(*arrays)


IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(_triton_quantize, _straight_through, _triton_supports, opaque=True),
    "xla": dispatch.Implementation(forward=_xla_quantize, backward=_straight_through),
}


def amax(x: jax.Array) -> jax.Array:
    """The largest magnitude of all of x, on every device, as `fp8_bits.amax`."""
    return over_all(fp8_bits.amax(x))


def over_all(bits: jax.Array) -> jax.Array:
    """The largest of float32's bits, of all of them and on every device: int32 []."""
    found = jnp.max(bits, initial=0)
    across = sharding.varying(found)
    return jax.lax.pmax(found, tuple(sorted(across))) if across else found


def raw_quantize(static: Static, x: jax.Array, largest: jax.Array | None = None) -> FP8Tensor:
    """For the rules of ops that quantise what they compute. largest: `amax` of x, where it is known."""
    chosen = dispatch.choose("quantize_fp8", IMPLEMENTATIONS, static.implementation, static, x)

    def run(x, scale):
        dims = [f"t{i}" for i in range(x.ndim)]
        split = x.ndim + static.token_axis + 1
        orders = {"rowwise": dims, "columnwise": dims[split:] + dims[:split]}
        rule = f"{' '.join(dims)}, One -> " + ", ".join(" ".join(orders[usage]) for usage in static.usages)
        forward = functools.partial(chosen.forward, static)
        found = sharding.local("quantize_fp8", rule, forward, x, scale, opaque=chosen.opaque)
        return found if isinstance(found, tuple) else (found,)

    def both(x, largest):
        scale, inverse = fp8_bits.scales(largest, static.format, static.power_of_two)
        return *run(x, scale[None]), inverse

    largest = amax(x) if largest is None else largest
    *codes, inverse = once_differentiable("quantize_fp8", both)(x, largest)
    found = dict(zip(static.usages, codes, strict=True))
    plain = found["rowwise"] if "rowwise" in found else restored(found["columnwise"], static.token_axis)
    copies = (found.get(usage) for usage in COPIES)
    proxy = make_proxy(plain, static.dtype)
    return FP8Tensor(*copies, inverse, static.dtype, static.token_axis, static.format, proxy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize(static: Static, x: jax.Array) -> FP8Tensor:
    return raw_quantize(static, x)


def _quantize_fwd(static: Static, x: jax.Array):
    return raw_quantize(static, x), None


def _quantize_bwd(static: Static, saved: None, dt: FP8Tensor):
    return (_straight_through(static, dt.proxy),)


_quantize.defvjp(_quantize_fwd, _quantize_bwd)
