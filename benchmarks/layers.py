"""The whole layer, ours and as JAX users write it: output alone, and output with all gradients.

The peers, in `jnp_usual` as most would write it and in `jnp_best` as well as we can (`peers.py` has their parts), are
cuDNN's attention on a GPU in bfloat16, V padded through the public function or as it is through the private one; in
`jnp_unpadded`, in bfloat16, that one is all that differs from `jnp_usual`.
"""

import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp

import jax_mla
from benchmarks import cases, peers, timing

SAMPLE_MS = 100.0  # a sample on a GPU: calls in a row, as a training step's layers are


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a layer of `jnp_layer` is made of; the last three for MXFP8."""

    rope: callable
    split: callable
    norm: callable
    multiply: callable = None
    quantize: callable = None
    dequantize: callable = None


PARTS = {
    "jnp_usual": Parts(peers.rope_usual, peers.split_usual, peers.norm_usual),
    "jnp_best": Parts(peers.rope_best, peers.split_best, peers.norm_usual),
}
PARTS_MXFP8 = {
    name: Parts(rope, split, norm, peers.MULTIPLY[name], peers.QUANTIZE[name], peers.DEQUANTIZE[name])
    for name, rope, split, norm in (
        ("jnp_usual", peers.rope_usual, peers.split_usual, peers.norm_usual),
        ("jnp_best", peers.rope_best, peers.split_best, peers.norm_best),
    )
}


def jnp_layer(parts: Parts, attend, config, params, x):
    """An MLA layer in jnp. In MXFP8, if `parts` have it, every GEMM's operands are rounded in both passes, from float32
    where a norm or a rotation is before it, and q, k and v for attention."""
    N, P, C = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    frequencies = 1.0 / config.rope.theta ** (jnp.arange(0, P, 2) / P)
    angles = jnp.arange(x.shape[1])[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    mxfp8 = parts.quantize is not None

    def weight(name):
        return params[name].astype(x.dtype)

    def multiply(x, w):
        """x [B, T, R] . w [R, H, D], in MXFP8 left in float32."""
        return parts.multiply(x, w) if mxfp8 else jnp.einsum("btr,rhd->bthd", x, w)

    def down(name):
        return multiply(x, weight(name)[:, None])[:, :, 0].astype(x.dtype)

    def normalised(latent, name):
        y = parts.norm(latent, params[name], config.norm_eps)
        return y if mxfp8 else y.astype(x.dtype)

    def rotated(latent, w):
        if parts.rope is not peers.rope_best:
            return parts.rope(multiply(latent, w), cos, sin, N)
        # The weight's rotary columns in the order of halves, so that nothing long is strided.
        w = jnp.concatenate([w[..., :N], w[..., N::2], w[..., N + 1 :: 2]], axis=-1)
        return peers.rope_best(multiply(latent, w), cos, sin, N, "halves")

    if config.q_lora_rank is None:
        q = rotated(x, weight("wq"))
    else:
        q = rotated(normalised(down("wq_a"), "q_norm"), weight("wq_b"))
    latent = down("wkv_a")
    kv = multiply(normalised(latent[..., :C], "kv_norm"), weight("wkv_b"))
    k, v = parts.split(kv, latent[..., C:].astype(kv.dtype), cos, sin, N)
    if mxfp8:
        q, k, v = (_rounded(parts, axis, x.dtype, a) for a, axis in ((q, -1), (k, -1), (v, 1)))
    o = attend(q, k, v)
    # Heads and V are contracted together.
    wo = weight("wo").reshape(-1, 1, x.shape[-1])
    return multiply(o.reshape(*x.shape[:2], -1), wo)[:, :, 0].astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rounded(parts: Parts, axis: int, dtype, x):
    """What is left of float32 x in MXFP8, blocks along an axis, in dtype; straight through backward."""
    return parts.dequantize(*jax.lax.optimization_barrier(parts.quantize(x, axis)), axis, dtype)


def _rounded_fwd(parts: Parts, axis: int, dtype, x):
    return _rounded(parts, axis, dtype, x), x[:0]


def _rounded_bwd(parts: Parts, axis: int, dtype, like, dy):
    return (dy.astype(like.dtype),)


_rounded.defvjp(_rounded_fwd, _rounded_bwd)


def layer_fp8(preset, tokens: int, repeats: int, seed: int) -> list[dict]:
    """Ours in FP8, also of weights that were `quantized` before, and keeping `codes` of all that attention reads and
    gives, beside ours under the other recipes, ours without one, `own`, and the peers in the preset's dtype."""
    return layer(preset, tokens, repeats, seed, "fp8")


def layer(preset, tokens: int, repeats: int, seed: int, recipe: str | None = None) -> list[dict]:
    """Rows of ours, and of the peers, in each direction."""
    config, dtype = preset.config, jnp.dtype(preset.dtype)
    keys = jax.random.split(jax.random.key(seed), 3)
    params = jax.jit(lambda key: jax_mla.init(key, config, dtype))(keys[0])
    x = jax.random.normal(keys[1], (preset.batch, tokens, config.hidden_size), dtype)
    dy = jax.random.normal(keys[2], x.shape, dtype)
    candidates = {
        name: functools.partial(_ours, config, recipe, choice) for name, choice in _choices().items()
    } | _peers(config, dtype, recipe)
    given = dict.fromkeys(candidates, params)
    if recipe == "fp8":
        ours = candidates["xla" if "xla" in candidates else "best"]
        codes = jax_mla.FP8Recipe(quantize_attention=True)
        candidates |= {"quantized": ours, "codes": functools.partial(_ours, config, codes, None)}
        others = {"own": None, "fp8_block": "fp8_block"} | ({"mxfp8": "mxfp8"} if tokens % 32 == 0 else {})
        candidates |= {name: functools.partial(_ours, config, other, None) for name, other in others.items()}
        tensors = jax.jit(lambda params: jax_mla.quantize_params(params, config, recipe=recipe))(params)
        given = dict.fromkeys(candidates, params) | dict(quantized=tensors)
    wanted = _exact(config, params, x, dy)
    rows = []
    for direction in ("fwd", "fwd_bwd"):
        timed, found = {}, {}
        for name, function in candidates.items():
            step = _with_gradients(function) if direction == "fwd_bwd" else lambda p, x, dy, f=function: f(p, x)
            try:
                compiled = jax.jit(step).lower(given[name], x, dy).compile()
                results = compiled(given[name], x, dy)
                error = cases.error(results, wanted if direction == "fwd_bwd" else wanted[0])
                del results
            except Exception as reason:  # a peer may be too large for the memory; ours says so
                if not name.startswith("jnp_"):
                    raise
                first = str(reason).partition("\n")[0]
                print(f"left out: layer {direction} by {name}: {type(reason).__name__}: {first}", file=sys.stderr)
                continue
            timed[name] = _sustained(functools.partial(compiled, given[name], x, dy))
            found[name] = dict(error=error, peak_bytes=compiled.memory_analysis().temp_size_in_bytes)
        for name, (ms, spread) in timing.side_by_side(timed, repeats).items():
            row = dict(op="layer" if recipe is None else f"layer_{recipe}", direction=direction, implementation=name)
            rows.append(row | dict(ms=ms, spread=spread) | found[name])
    return rows


def _choices() -> dict:
    """Ours, by what a row is called."""
    if jax.default_backend() != "gpu":
        return {"xla": "xla"}
    kernels = {"triton": ("cudnn", "triton", "xla")} if "triton" in cases.names("q_up_proj_rope") else {"xla": "xla"}
    return {"best": None} | kernels  # best: whatever the ops take by themselves


def _ours(config, recipe, choice, params, x):
    return jax_mla.mla(params, x, config, recipe=recipe, implementation=choice)


def _peers(config, dtype, recipe) -> dict:
    parts = PARTS_MXFP8 if recipe == "mxfp8" else PARTS
    attentions = peers.attentions(dtype)
    found = {name: functools.partial(jnp_layer, parts[name], attend, config) for name, attend in attentions.items()}
    if recipe != "mxfp8" and "jnp_best" in attentions:
        found["jnp_unpadded"] = functools.partial(jnp_layer, parts["jnp_usual"], attentions["jnp_best"], config)
    return found


def _with_gradients(function):
    """Output, and the gradients of parameters, a tensor's being that of its proxy, and input."""

    def step(params, x, dy):
        tensors = {name: p for name, p in params.items() if isinstance(p, jax_mla.FP8Tensor)}
        arrays = {name: p.proxy if name in tensors else p for name, p in params.items()}

        def run(arrays, x):
            made = {name: dataclasses.replace(t, proxy=arrays[name]) for name, t in tensors.items()}
            return function(arrays | made, x)

        y, pullback = jax.vjp(run, arrays, x)
        return y, pullback(dy)

    return step


def _exact(config, params, x, dy):
    """The usual layer in float32, a batch row at a time, and in it a head of attention at a time."""
    function = functools.partial(jnp_layer, PARTS["jnp_usual"], peers.attention_exact, config)
    with jax.default_matmul_precision("highest"):
        row = jax.jit(_with_gradients(function))
        rows = [row(params, *(a[i : i + 1].astype(jnp.float32) for a in (x, dy))) for i in range(len(x))]
    ys, gradients = zip(*rows, strict=True)
    dparams, dxs = zip(*gradients, strict=True)
    return jnp.concatenate(ys), (jax.tree.map(lambda *leaves: sum(leaves), *dparams), jnp.concatenate(dxs))


def _sustained(run) -> timing.Timed:
    single = timing.Timed(run)
    if not timing.repeats_in_program():
        return single
    ms = min(timing.sample(single) for _ in range(2))
    return dataclasses.replace(single, calls=min(max(math.ceil(SAMPLE_MS / ms), 1), timing.MOST))
