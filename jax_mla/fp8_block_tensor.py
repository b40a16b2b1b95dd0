"""The tensor of FP8 codes with a float32 scale for every block of 128: its copies, and where blocks lie.

Gradients pass through its proxy, as through an `MXFP8Tensor`'s: `mxfp8_tensor.py` tells how.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_mla import checks, sharding
from jax_mla.coded import COPIES, Coded, static_field
from jax_mla.mxfp8_bits import CODES
from jax_mla.mxfp8_tensor import check_dtype, check_token_axis

BLOCK = 128  # values a scale; both ways in a square
SHAPES = ("1x128", "128x128")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FP8BlockTensor(Coded):
    """A tensor [..., T, ..., K] as E4M3 codes with a scale a block: value = code * scale, as DeepSeek-V3's
    `weight_scale_inv` multiplies. Where a dim ends within a block, that block is short and has a scale of its own.

    block "1x128", of activations and cotangents: rowwise_codes float8_e4m3fn, the tensor's shape and order;
    rowwise_scales float32 [..., T, ceil(K / 128)], of 128 neighbours along the dims after `token_axis`, flattened;
    columnwise_codes of the same shape; columnwise_scales [..., ceil(T / 128), ..., K], of 128 neighbours along
    `token_axis`. Either pair may be None.
    block "128x128", of weights: rowwise_codes, the tensor's shape and order; rowwise_scales [ceil(R / 128),
    ceil(K / 128)], of squares of the matrix of R, the dims up to `token_axis` flattened, and K, those after it. What
    reads either copy reads these: columnwise_codes and columnwise_scales are None.

    dtype: the logical dtype, that of the values before quantisation and of their gradients. token_axis: negative; -2
    for [B, T, K], -3 for [B, T, H, D] and for weights [R, H, D]. proxy: carries the gradient; None in a tensor that
    needs none.

    A pytree (dtype, token_axis and block are static) for jit, scan, vmap and remat; immutable. Codes carry no gradient
    of their own: differentiate through `dequantize` or the ops that take tensors.
    """

    rowwise_codes: jax.Array | None
    rowwise_scales: jax.Array | None
    columnwise_codes: jax.Array | None
    columnwise_scales: jax.Array | None
    dtype: np.dtype = static_field()
    token_axis: int = static_field()
    block: str = static_field()
    proxy: jax.Array | None = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", check_dtype("dtype", self.dtype))
        object.__setattr__(self, "token_axis", check_token_axis(self.token_axis))
        checks.choice("block", self.block, SHAPES)

    codes_dtype = CODES

    @property
    def square(self) -> bool:
        return self.block == "128x128"

    @property
    def usages(self) -> tuple[str, ...]:
        """Which copies there are: "rowwise", "columnwise"; squares are both."""
        if self.square:
            return COPIES if self.rowwise_codes is not None else ()
        return super().usages

    @property
    def shape(self) -> tuple[int, ...]:
        codes = self.columnwise_codes if self.rowwise_codes is None else self.rowwise_codes
        if codes is None:
            raise ValueError("shape: found an FP8BlockTensor without codes, wanted a row-wise or column-wise copy")
        return tuple(codes.shape)

    def codes(self, usage: str) -> jax.Array:
        """The codes of one copy, as fp8. ValueError naming the usage if the tensor lacks it."""
        checks.choice("usage", usage, COPIES)
        return super().codes("rowwise" if self.square else usage)

    def copy(self, usage: str) -> tuple[jax.Array, jax.Array]:
        """Codes (as float8_e4m3fn) and scales of one copy. ValueError naming the usage if the tensor lacks it."""
        return self.codes(usage), self.rowwise_scales if self.square else getattr(self, f"{usage}_scales")

    def only(self, usage: str) -> "FP8BlockTensor":
        """The tensor with one of its copies, of squares as it is. ValueError naming the usage if it lacks it."""
        self.codes(usage)
        if self.square:
            return self
        (other,) = (name for name in COPIES if name != usage)
        return dataclasses.replace(self, **{f"{other}_codes": None, f"{other}_scales": None})

    def bytes(self) -> "FP8BlockTensor":
        """The tensor with its codes as uint8, as `MXFP8Tensor.bytes`."""
        codes = {name: getattr(self, name) for name in ("rowwise_codes", "columnwise_codes")}
        # What are bytes already stay the same array: two ops that keep a tensor then keep it once.
        changed = {n: c for n, c in codes.items() if c is not None and c.dtype != jnp.uint8}
        changed = {n: jax.lax.bitcast_convert_type(c, jnp.uint8) for n, c in changed.items()}
        return dataclasses.replace(self, **changed)

    def layout(self, usage: str) -> "Layout":
        """Where the blocks of one copy lie."""
        return layout(self.ndim, self.token_axis, "square" if self.square else usage)

    def __repr__(self) -> str:
        codes = self.columnwise_codes if self.rowwise_codes is None else self.rowwise_codes
        shape = list(codes.shape) if hasattr(codes, "shape") else "[?]"  # jax.tree functions may put anything here
        copies = "both" if self.square and self.usages else " and ".join(self.usages) or "empty"
        return f"FP8BlockTensor({self.dtype}{shape}, {self.block}, {copies}, token_axis={self.token_axis})"


jax.export.register_pytree_node_serialization(
    FP8BlockTensor,
    serialized_name="jax_mla.FP8BlockTensor",
    serialize_auxdata=lambda static: " ".join(map(str, static)).encode(),
    deserialize_auxdata=lambda text: _static(*text.decode().split()),
)


def _static(dtype: str, token_axis: str, block: str) -> tuple:
    return np.dtype(dtype), int(token_axis), block


class Layout(NamedTuple):
    """The blocks of a tensor of some rank: which dims are one in them, and which of the result they divide."""

    kind: str  # "rowwise", "columnwise", "square"
    groups: tuple[tuple[int, ...], ...]  # the tensor's dims, in order; those in one group are flattened
    blocked: tuple[int, ...]  # of the groups

    def flat(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(math.prod(shape[dim] for dim in group) for group in self.groups)

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor of that shape."""
        return tuple(-(-n // BLOCK) if i in self.blocked else n for i, n in enumerate(self.flat(shape)))

    def names(self) -> tuple[str, str]:
        """For `sharding.local`: the dims of codes and of scales. Of what is flattened only the first may be spread."""
        dims = {dim: f"t{dim}" if at == 0 else f"T{dim}" for group in self.groups for at, dim in enumerate(group)}
        return " ".join(dims[dim] for dim in sorted(dims)), " ".join(dims[group[0]] for group in self.groups)


def layout(ndim: int, token_axis: int, kind: str) -> Layout:
    dims, split = tuple(range(ndim)), ndim + token_axis + 1
    if kind == "columnwise":
        return Layout(kind, tuple((dim,) for dim in dims), (split - 1,))
    rows = (dims[:split],) if kind == "square" else tuple((dim,) for dim in dims[:split])
    return Layout(kind, (*rows, dims[split:]), (0, 1) if kind == "square" else (split,))


def check_spread(argument: str, array: jax.Array, where: Layout) -> None:
    """ValueError unless blocks are whole on every device of an Explicit mesh: short ones end a dim, no device's
    share."""
    for group in (where.groups[i] for i in where.blocked):
        names = sharding.spec(array)[group[0]]
        parts = math.prod(jax.typeof(array).sharding.mesh.shape[name] for name in names)
        share = math.prod(array.shape[dim] for dim in group) // parts
        if parts > 1 and share % BLOCK:
            axes = ", ".join(str(dim - array.ndim) for dim in group)
            raise ValueError(
                f"{argument}: found axis {axes} with {share} values on each device of mesh axes {names}, wanted a "
                f"multiple of {BLOCK} for {where.kind} blocks"
            )


def check(argument: str, t: FP8BlockTensor, *usages: str) -> None:
    """Raises TypeError or ValueError, naming the argument, unless t is a well-formed tensor with these copies."""
    if not isinstance(t, FP8BlockTensor):
        raise TypeError(f"{argument}: found {checks.show(t)}, wanted an FP8BlockTensor")
    if not t.usages:
        raise ValueError(f"{argument}: found an FP8BlockTensor without codes, wanted a row-wise or column-wise copy")
    for usage in usages:
        if usage not in t.usages:
            raise checks.found(argument, t, f"an FP8BlockTensor with a {usage} copy (found only {t.usages[0]})")
    if t.ndim < -t.token_axis:
        raise checks.found(argument, t, f"at least {-t.token_axis} dims")
    if t.square and t.columnwise_codes is not None:
        raise checks.found(f"{argument}.columnwise_codes", t.columnwise_codes, "None: squares have one copy, row-wise")
    if t.proxy is not None and (getattr(t.proxy, "dtype", None) != t.dtype or t.proxy.shape != t.shape):
        raise checks.found(f"{argument}.proxy", t.proxy, f"None or {t.dtype}{list(t.shape)}")
    for usage in ("rowwise",) if t.square else t.usages:
        codes, scales = getattr(t, f"{usage}_codes"), getattr(t, f"{usage}_scales")
        if codes.dtype not in (CODES, jnp.uint8) or tuple(codes.shape) != t.shape:
            raise checks.found(f"{argument}.{usage}_codes", codes, f"float8_e4m3fn (or its bytes) {list(t.shape)}")
        wanted = t.layout(usage).scales(t.shape)
        if getattr(scales, "dtype", None) != jnp.float32 or tuple(scales.shape) != wanted:
            raise checks.found(f"{argument}.{usage}_scales", scales, f"float32{list(wanted)}")
        check_spread(argument, codes, t.layout(usage))
