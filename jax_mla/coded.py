"""What quantised tensors have in common: copies of codes, a proxy for the gradient, and bytes to stack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import checks

COPIES = ("rowwise", "columnwise")


class Coded:
    """Base of the tensor dataclasses: fields `rowwise_codes`, `columnwise_codes`, `dtype`, `token_axis`, `proxy`."""

    codes_dtype: np.dtype  # of a class, or by its fields

    @property
    def usages(self) -> tuple[str, ...]:
        """Which copies there are: "rowwise", "columnwise"."""
        return tuple(usage for usage in COPIES if getattr(self, f"{usage}_codes") is not None)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def shell(self) -> tuple:
        """What of the tensor is no array, hashable: `of_gradient` makes its cotangent of it."""
        named = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.metadata.get("static"))
        return type(self), tuple(named)

    def codes(self, usage: str) -> jax.Array:
        """The codes of one copy, as fp8. ValueError naming the usage if the tensor lacks it."""
        checks.choice("usage", usage, COPIES)
        if usage not in self.usages:
            raise ValueError(
                f"usage: found {self!r}, which has no {usage} copy, wanted one quantised with usage={usage!r} or 'both'"
            )
        codes = getattr(self, f"{usage}_codes")
        return jax.lax.bitcast_convert_type(codes, self.codes_dtype) if codes.dtype == jnp.uint8 else codes

    def placed(self) -> jax.Array:
        """What has the tensor's shape, and how it is spread over a mesh."""
        return self.codes(self.usages[0])

    def detach(self):
        """The tensor without its proxy, hence without gradients: for results of jit, caches, pre-quantised weights."""
        return dataclasses.replace(self, proxy=None)

    def bytes(self):
        """The tensor with its codes as uint8, same bits: what to stack or carry in `lax.scan`, where XLA may widen fp8
        arrays. Every op takes it as it is and reads the codes as fp8."""
        codes = {name: getattr(self, name) for name in (f"{usage}_codes" for usage in self.usages)}
        # What are bytes already stay the same array: two ops that keep a tensor then keep it once.
        changed = {n: jax.lax.bitcast_convert_type(c, jnp.uint8) for n, c in codes.items() if c.dtype != jnp.uint8}
        return dataclasses.replace(self, **changed)


def static_field():
    return dataclasses.field(metadata={"static": True})


def of_gradient(shell: tuple, gradient: jax.Array | None) -> Coded:
    """The cotangent of a tensor: `gradient`, of the values, on its proxy."""
    kind, named = shell
    arrays = dict.fromkeys(f.name for f in dataclasses.fields(kind) if not f.metadata.get("static"))
    return kind(**arrays | dict(named) | dict(proxy=gradient))
