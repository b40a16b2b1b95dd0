"""The layer as a Flax nnx module."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules

from jax_mla import checks, dispatch, layer, params, recipes
from jax_mla import remat as policies
from jax_mla.config import MLAConfig
from jax_mla.decode import LatentCache, decode, prefill
from jax_mla.recipes import Recipe


class MLA(nnx.Module):
    """Multi-head Latent Attention; its parameters are attributes by the names of `jax_mla.init`.

    config: the dims. dtype: what to compute in; None is x's. param_dtype: of the parameters. recipe, remat,
    implementation: as `jax_mla.mla`. rngs: an `nnx.Rngs`, whose next "params" key is used, or a key itself:
    `MLA(config, rngs=key)` holds the very values of `jax_mla.init(key, config)` and of the linen module. Parameters
    carry MaxText's logical axes (`out_sharding` in their metadata, for `nnx.get_partition_spec`).
    """

    def __init__(
        self,
        config: MLAConfig,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        *,
        rngs: nnx.Rngs | jax.Array,
        recipe: Recipe = None,
        remat: str | None = None,
        implementation: Any = None,
    ):
        recipes.check(recipe)
        policies.check(remat)
        dispatch.check(implementation)
        self.config = config
        self.dtype = dtype
        self.recipe = recipe
        self.remat = remat
        self.implementation = implementation
        key = rngs.params() if isinstance(rngs, nnx.Rngs) else rngs
        values = params.init(key, config, param_dtype)
        self._names = tuple(values)
        # Flax shards a parameter as it is made; logical names mean something to it only under axis rules.
        eager = nnx.using_eager_sharding() and bool(get_logical_axis_rules())
        for name, axes in params.logical_axes(config).items():
            setattr(self, name, nnx.Param(values[name], out_sharding=axes, eager_sharding=eager))

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        context_axis: str | None = None,
        return_max_logit: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """x [B, T, M] -> y [B, T, M] in `dtype` (x's where that is None). Otherwise as `jax_mla.mla`."""
        options = dict(positions=positions, segment_ids=segment_ids, context_axis=context_axis)
        options |= dict(recipe=self.recipe, remat=self.remat, return_max_logit=return_max_logit)
        return self._run(layer.mla, x, **options)

    def prefill(
        self, x: jax.Array, cache: LatentCache, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, LatentCache]:
        """`jax_mla.prefill`: y and the cache. Without the recipe, as all of generation."""
        return self._run(prefill, x, cache, lengths=lengths)

    def decode(
        self, x: jax.Array, cache: LatentCache, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, LatentCache]:
        """`jax_mla.decode`: y and the cache."""
        return self._run(decode, x, cache, lengths=lengths)

    def _run(self, function, x, *args, **options):
        own = {name: getattr(self, name)[...] for name in self._names}
        x = checks.cast("x", x, "B T M", self.dtype)
        return function(own, x, self.config, *args, implementation=self.implementation, **options)
