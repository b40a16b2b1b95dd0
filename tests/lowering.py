"""Traces and lowers every op for CUDA on a machine without a GPU: `python tests/lowering.py 90` prints, as JSON, in a
list, the number of custom calls in each program, which programs loop, which add up over devices, and how often cuDNN's
attention runs forward and backward. A process of its own: the tests of kernels need Triton's interpreter, which is
chosen when triton is imported. `python tests/lowering.py 90 100/swizzle_scales` prints two of them, one with that
program alone.
"""

import json
import os
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax_mla.ffi import cudnn_attention
from jax_mla.ffi.triton import TARGETS, compile_for

from jax_mla import (
    MLAConfig,
    apply_rope,
    apply_rope_kv,
    attention,
    dequantize,
    init,
    kv_up_proj_rope,
    mla,
    q_up_proj_rope,
    quantize_fp8,
    quantize_mxfp8,
    rms_norm,
    rms_norm_quantize,
    rope_tables,
    swizzle_scales,
)

B, T, H = 2, 64, 3
CONFIG = MLAConfig.tiny()
BF16 = jnp.bfloat16


def tables():
    return rope_tables(jnp.arange(T), CONFIG.rope, 64)


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def values(t):
    return dequantize(t.only("rowwise")), dequantize(t.only("columnwise"))


def with_gradients(function):
    def run(*args):
        outputs, pullback = jax.vjp(function, *args)
        return outputs, pullback(jax.tree.map(lambda o: o * 0.5, outputs))

    return run


def up(recipe, out=None):
    return dict(nope_dim=128, recipe=recipe, out=out, implementation="triton")


X, LATENT, W = array(B, T, H, 192), array(B, T, 512), array(512, H, 192, dtype=jnp.float32)
SCALE = array(512, dtype=jnp.float32)
QKV = [X, X, array(B, T, H, 128)]
PARAMS = jax.eval_shape(lambda: init(jax.random.key(0), CONFIG))
ONE = dict(implementation="triton")
# name: (function, arguments). Each is lowered with its gradients.
OPS = {
    "apply_rope": (lambda x: apply_rope(x, *tables(), rotary_dim=64, **ONE), [X]),
    "apply_rope_kv": (
        lambda kv, k_pe: apply_rope_kv(kv, k_pe, *tables(), nope_dim=128, **ONE),
        [array(B, T, H, 256), array(B, T, 64)],
    ),
    "rms_norm": (lambda x, s: rms_norm(x, s, 1e-6, **ONE), [LATENT, SCALE]),
    "quantize_mxfp8": (lambda x: values(quantize_mxfp8(x, usage="both", token_axis=-3, **ONE)), [X]),
    "quantize_fp8": (lambda x: values(quantize_fp8(x, usage="both", token_axis=-3, **ONE)), [X]),
    "rms_norm_quantize": (lambda x, s: values(rms_norm_quantize(x, s, 1e-6, usage="both", **ONE)), [LATENT, SCALE]),
    "q_up_proj_rope": (
        lambda x, w, s: q_up_proj_rope(x, w, *tables(), norm_scale=s, **up(None)),
        [LATENT, W, SCALE],
    ),
    "q_up_proj_rope, mxfp8": (
        lambda x, w, s: values(q_up_proj_rope(x, w, *tables(), norm_scale=s, **up("mxfp8", "mxfp8"))),
        [LATENT, W, SCALE],
    ),
    "kv_up_proj_rope": (
        lambda x, w, p, s: kv_up_proj_rope(x, w, p, *tables(), norm_scale=s, **up(None)),
        [LATENT, array(512, H, 256), array(B, T, 64), SCALE],
    ),
    "kv_up_proj_rope, mxfp8": (
        lambda x, w, p, s: [
            values(t) for t in kv_up_proj_rope(x, w, p, *tables(), norm_scale=s, **up("mxfp8", "mxfp8"))
        ],
        [LATENT, array(512, H, 256), array(B, T, 64), SCALE],
    ),
    "q_up_proj_rope, fp8": (
        lambda x, w, s: q_up_proj_rope(x, w, *tables(), norm_scale=s, **up("fp8")),
        [LATENT, W, SCALE],
    ),
    "kv_up_proj_rope, fp8": (
        lambda x, w, p, s: kv_up_proj_rope(x, w, p, *tables(), norm_scale=s, **up("fp8")),
        [LATENT, array(512, H, 256), array(B, T, 64), SCALE],
    ),
    "mla": (lambda p, x: mla(p, x, CONFIG, implementation=("triton", "xla")), [PARAMS, array(B, T, 128)]),
    # By what None takes.
    "attention, packed": (lambda *a: attention(*a, cu_seqlens=jnp.array([[0, 7, T]] * B)), [X, X, array(B, T, H, 128)]),
    "attention, largest logits": (lambda *a: attention(*a, return_max_logit=True), [X, X, array(B, T, H, 128)]),
    "attention": (attention, [X, X, array(B, T, H, 128)]),
}
FORWARD = {
    "attention, by ids": (
        lambda *a: attention(*a, segment_ids=jnp.ones((B, T), int)),
        [X, X, array(B, T, H, 128)],
    ),
    "swizzle_scales": (lambda s: swizzle_scales(s, token_axis=-3, **ONE), [array(B, T, H, 6, dtype=jnp.uint8)]),
    "vmap swizzle_scales": (
        jax.vmap(lambda s: swizzle_scales(s, token_axis=-3, **ONE)),
        [array(B, T, H, 6, dtype=jnp.uint8)],
    ),
    "vmap tables": (
        jax.vmap(lambda x, c, s: apply_rope(x, c, s, rotary_dim=64, **ONE), (None, 0, 0)),
        [array(T, H, 192), *[array(B, T, 32, dtype=jnp.float32)] * 2],
    ),
    "vmap weights": (jax.vmap(lambda x, s: rms_norm(x, s, 1e-6, **ONE)), [LATENT, array(B, 512)]),
    "scan": (
        lambda x: jax.lax.scan(lambda c, _: (apply_rope(c, *tables(), rotary_dim=64, **ONE), None), x, length=3),
        [X],
    ),
}


# Under two vmaps that share the weights; gradients of each entry. The rows are as many as without, in other shapes.
VMAPPED = ("apply_rope", "apply_rope_kv", "rms_norm", "quantize_mxfp8", "rms_norm_quantize", "kv_up_proj_rope")
VMAPPED += ("quantize_fp8", "q_up_proj_rope, fp8")


def vmapped(name):
    function, arguments = OPS[name]
    axes = [0 if a.shape[0] == B else None for a in arguments]
    arguments = [a if axis is None else array(B, 1, 1, *a.shape[1:]) for a, axis in zip(arguments, axes, strict=True)]
    return jax.vmap(jax.vmap(with_gradients(function), axes), axes), arguments


def spread():
    """The gradient of a scale that rows on two devices read."""
    mesh = jax.make_mesh((2,), ("data",))
    x = jax.ShapeDtypeStruct(LATENT.shape, BF16, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return jax.grad(lambda s, x: jnp.sum(rms_norm(x, s, 1e-6, **ONE).astype(jnp.float32))), [SCALE, x]


def checkpointed():
    """Gradients through cuDNN's attention of what kernels quantise, under a policy that keeps o and lse."""
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def loss(*arrays):
        usages = ("rowwise", "rowwise", "columnwise")
        tensors = [quantize_mxfp8(a, usage=u, token_axis=-3) for a, u in zip(arrays, usages, strict=True)]
        return jnp.sum(attention(*tensors, implementation="cudnn").astype(jnp.float32))

    # With the value: nothing but the backward pass would read attention's first results otherwise.
    return jax.value_and_grad(jax.checkpoint(loss, policy=policy), (0, 1, 2)), QKV


def lowered(function, arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def main(capability: int, *names: str) -> dict:
    programs = {n: (with_gradients(f), a) for n, (f, a) in OPS.items()} | FORWARD
    programs |= {f"vmap {name}": vmapped(name) for name in VMAPPED} | {"spread": spread()}
    programs["checkpoint"] = checkpointed()
    with compile_for(capability):
        texts = {name: lowered(*p) for name, p in programs.items() if name in names or not names}
    calls = {name: re.findall(r"custom_call @([\w$]+)", text) for name, text in texts.items()}
    found = {name: sum(target in TARGETS for target in targets) for name, targets in calls.items()}
    loops = [name for name, text in texts.items() if "stablehlo.while" in text]
    sums = [name for name, text in texts.items() if "all_reduce" in text]
    attends = {n: [c.count(target) for target in cudnn_attention.TARGETS] for n, c in calls.items()}
    attends = {name: counts for name, counts in attends.items() if any(counts)}
    return found | {"loops": loops, "sums over devices": sums, "by cuDNN": attends}


if __name__ == "__main__":
    print(json.dumps([main(int(first), *names) for first, *names in (a.split("/") for a in sys.argv[1:])]))
