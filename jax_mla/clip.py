"""QK-clip: weights that keep attention's logits below a bound, for Muon."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_mla import checks
from jax_mla.coded import Coded


def qk_clip(params: Mapping[str, jax.Array], max_logits: jax.Array, threshold: float) -> dict[str, jax.Array]:
    """`params` with the heads scaled down whose largest logit was above `threshold` (MuonClip, arXiv:2507.20534, 2.1).

    params: one layer's, as `init` gives them, arrays. max_logits: floating [H], a head's largest scaled logit over the
    whole batch: `max_logit` of `mla(return_max_logit=True)`; over devices that have different tokens, their maximum.
    threshold: Python float, positive.

    Of head h with max_logits[h] > threshold, gamma = threshold / max_logits[h]: its query and key columns before RoPE
    (N of wq_b or wq, and of wkv_b) are multiplied by gamma^0.5, its rotary query columns by gamma, since the rotary key
    is shared by all heads. Values and everything else stay. Computed in float32 at least, returned in each parameter's
    dtype: logits of the same x are gamma times what they were.

    Heads without a finite maximum above the threshold stay (NaN and infinity too, which no scale mends). To be called
    after the optimizer's update, outside of differentiation. Raises ValueError or TypeError naming the argument.
    """
    if not isinstance(params, Mapping) or "wkv_b" not in params or "wo" not in params:
        raise TypeError(
            f"params: found {checks.show(params)}, wanted one layer's dict of parameters, as `init` makes it"
        )
    query = "wq_b" if "wq_b" in params else "wq"
    for name in (query, "wkv_b", "wo"):
        if isinstance(params.get(name), Coded):
            raise TypeError(f"params[{name!r}]: found {params[name]!r}, wanted the array that it was quantised from")
    heads, value = checks.dims("params['wo']", params["wo"], "H V M")["H"], params["wo"].shape[1]
    width = checks.dims(f"params[{query!r}]", params.get(query), "R H D", H=heads)["D"]
    nope = checks.dims("params['wkv_b']", params["wkv_b"], "C H E", H=heads)["E"] - value
    if not 0 <= nope < width:
        raise checks.found("params['wkv_b']", params["wkv_b"], f"N + V columns a head, with N below {width}, V {value}")
    checks.dims("max_logits", max_logits, "H", H=heads)
    checks.floating("max_logits", max_logits)
    threshold = checks.static_float("threshold", threshold, 0.0, exclusive=True)

    largest = max_logits.astype(jnp.promote_types(max_logits.dtype, jnp.float32))
    above = (largest > threshold) & jnp.isfinite(largest)
    gamma = jnp.where(above, threshold / jnp.where(above, largest, 1), 1)

    def scaled(w, plain, rest):
        """Columns of each head: `plain` factors [H] for the first `nope`, `rest` for the others."""
        factors = jnp.where(jnp.arange(w.shape[-1]) < nope, plain[:, None], rest[:, None])
        return (w.astype(jnp.promote_types(w.dtype, jnp.float32)) * factors).astype(w.dtype)

    root, one = jnp.sqrt(gamma), jnp.ones_like(gamma)
    return dict(params) | {
        query: scaled(params[query], root, gamma),
        "wkv_b": scaled(params["wkv_b"], root, one),
    }
