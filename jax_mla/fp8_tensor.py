"""The FP8 tensor: codes with one float32 scale for all, as it lies and transposed.

Gradients pass through its proxy, as through an `MXFP8Tensor`'s: `mxfp8_tensor.py` tells how.
"""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_mla import checks, fp8_bits
from jax_mla.coded import COPIES, Coded, static_field
from jax_mla.mxfp8_tensor import check_dtype, check_token_axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FP8Tensor(Coded):
    """A tensor [..., T, ..., K] as FP8 codes: value = code * scale_inv, one scale for the whole tensor.

    rowwise_codes: float8_e4m3fn or float8_e5m2, the tensor's shape and order. columnwise_codes: the same codes with the
    dims after `token_axis` in front, [..., K, ..., T]: what contracts the others reads memory in order, as Hopper's FP8
    GEMMs want. Either may be None. scale_inv: float32 []. dtype: the logical dtype, that of the values before
    quantisation and of their gradients. token_axis: negative; -2 for [B, T, K], -3 for [B, T, H, D] and for weights
    [R, H, D]. format: "e4m3" or "e5m2". proxy: carries the gradient; None in a tensor that needs none.

    A pytree (dtype, token_axis and format are static) for jit, scan, vmap and remat; immutable. Codes carry no gradient
    of their own: differentiate through `dequantize` or the ops that take tensors.
    """

    rowwise_codes: jax.Array | None
    columnwise_codes: jax.Array | None
    scale_inv: jax.Array | None
    dtype: np.dtype = static_field()
    token_axis: int = static_field()
    format: str = static_field()
    proxy: jax.Array | None = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", check_dtype("dtype", self.dtype))
        object.__setattr__(self, "token_axis", check_token_axis(self.token_axis))
        checks.choice("format", self.format, tuple(fp8_bits.CODES))

    @property
    def codes_dtype(self) -> np.dtype:
        return fp8_bits.CODES[self.format]

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rowwise_codes is not None:
            return tuple(self.rowwise_codes.shape)
        if self.columnwise_codes is None:
            raise ValueError("shape: found an FP8Tensor without codes, wanted a row-wise or column-wise copy")
        trailing = -1 - self.token_axis
        return tuple(self.columnwise_codes.shape[trailing:] + self.columnwise_codes.shape[:trailing])

    def copy(self, usage: str) -> tuple[jax.Array, jax.Array]:
        """Codes (as fp8) of one copy, and scale_inv. ValueError naming the usage if the tensor lacks it."""
        return self.codes(usage), self.scale_inv

    def placed(self) -> jax.Array:
        """What has the tensor's shape, and how it is spread over a mesh."""
        usage = self.usages[0]
        return self.codes(usage) if usage == "rowwise" else restored(self.codes(usage), self.token_axis)

    def only(self, usage: str) -> "FP8Tensor":
        """The tensor with one of its copies (what wgrad saves is the column-wise one). ValueError if it lacks it."""
        self.codes(usage)
        (other,) = (name for name in COPIES if name != usage)
        return dataclasses.replace(self, **{f"{other}_codes": None})

    def __repr__(self) -> str:
        codes = self.rowwise_codes if self.rowwise_codes is not None else self.columnwise_codes
        shape = list(self.shape) if hasattr(codes, "shape") else "[?]"  # jax.tree functions may put anything here
        copies = " and ".join(self.usages) or "empty"
        return f"FP8Tensor({self.dtype}{shape}, {self.format}, {copies}, token_axis={self.token_axis})"


jax.export.register_pytree_node_serialization(
    FP8Tensor,
    serialized_name="jax_mla.FP8Tensor",
    serialize_auxdata=lambda static: " ".join(map(str, static)).encode(),
    deserialize_auxdata=lambda text: _static(*text.decode().split()),
)


def _static(dtype: str, token_axis: str, format: str) -> tuple:
    return np.dtype(dtype), int(token_axis), format


def transposed(x: jax.Array, token_axis: int) -> jax.Array:
    """x with the dims after `token_axis` in front."""
    split = x.ndim + token_axis + 1
    return jnp.transpose(x, (*range(split, x.ndim), *range(split)))


def restored(x: jax.Array, token_axis: int) -> jax.Array:
    """The inverse."""
    trailing = -1 - token_axis
    return jnp.transpose(x, (*range(trailing, x.ndim), *range(trailing)))


def check(argument: str, t: FP8Tensor, *usages: str) -> None:
    """Raises TypeError or ValueError, naming the argument, unless t is a well-formed tensor with these copies."""
    if not isinstance(t, FP8Tensor):
        raise TypeError(f"{argument}: found {checks.show(t)}, wanted an FP8Tensor")
    if not t.usages:
        raise ValueError(f"{argument}: found an FP8Tensor without codes, wanted a row-wise or column-wise copy")
    for usage in usages:
        if usage not in t.usages:
            raise checks.found(argument, t, f"an FP8Tensor with a {usage} copy (found only {t.usages[0]})")
    if t.ndim < -t.token_axis:
        raise checks.found(argument, t, f"at least {-t.token_axis} dims")
    if t.proxy is not None and (getattr(t.proxy, "dtype", None) != t.dtype or t.proxy.shape != t.shape):
        raise checks.found(f"{argument}.proxy", t.proxy, f"None or {t.dtype}{list(t.shape)}")
    split = t.ndim + t.token_axis + 1
    shapes = {"rowwise": t.shape, "columnwise": t.shape[split:] + t.shape[:split]}
    for usage in t.usages:
        codes = getattr(t, f"{usage}_codes")
        if codes.dtype not in (t.codes_dtype, jnp.uint8) or codes.shape != shapes[usage]:
            wanted = f"{t.codes_dtype} (or its bytes) {list(shapes[usage])}"
            raise checks.found(f"{argument}.{usage}_codes", codes, wanted)
    if t.scale_inv is None or t.scale_inv.dtype != jnp.float32 or t.scale_inv.shape:
        raise checks.found(f"{argument}.scale_inv", t.scale_inv, "float32[]")
