"""The layer as a Flax linen module."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_mla import checks, layer, params
from jax_mla.config import MLAConfig
from jax_mla.decode import LatentCache, decode, prefill
from jax_mla.recipes import Recipe


class MLA(nn.Module):
    """Multi-head Latent Attention. `module.init(key, x)` holds the very values of `jax_mla.init(key, config)`.

    config: the dims. dtype: what to compute in; None is x's. param_dtype: of the parameters. recipe, remat,
    implementation: as `jax_mla.mla`. Parameters carry MaxText's logical axes (`nn.get_partition_spec`,
    `nn.logical_to_mesh`); inside another module each instance draws its own values.
    """

    config: MLAConfig
    dtype: Any = None
    param_dtype: Any = jnp.float32
    recipe: Recipe = None
    remat: str | None = None
    implementation: Any = None

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

    @nn.compact
    def _run(self, function, x, *args, **options):
        # The module's own key, before linen folds parameters' names into it: one initialiser serves both Flax APIs. At
        # apply time linen asks initialisers for shapes alone, and hands them a key of its own.
        base = self.scope.rngs["params"].as_jax_rng() if self.is_initializing() else None

        def initializer(key, name, spec):
            return params.draw(key if base is None else base, name, spec, self.param_dtype)

        own = {
            name: self.param(name, nn.with_logical_partitioning(initializer, spec.axes), name, spec)
            for name, spec in params.specs(self.config).items()
        }
        x = checks.cast("x", x, "B T M", self.dtype)
        return function(own, x, self.config, *args, implementation=self.implementation, **options)
