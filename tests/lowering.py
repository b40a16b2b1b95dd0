"""Traces and lowers every op for CUDA on a machine without a GPU: `python tests/lowering.py 90` prints, as JSON, the
number of custom calls in each program. A process of its own: the tests of kernels need Triton's interpreter, which is
chosen when triton is imported.
"""

import json
import os
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax_mla.ffi.triton import TARGETS, compile_for

from jax_mla import (
    MLAConfig,
    apply_rope,
    apply_rope_kv,
    dequantize,
    init,
    kv_up_proj_rope,
    mla,
    q_up_proj_rope,
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
    "mla": (lambda p, x: mla(p, x, CONFIG, implementation=("triton", "xla")), [PARAMS, array(B, T, 128)]),
    "mla, mxfp8": (
        lambda p, x: mla(p, x, CONFIG, recipe="mxfp8", implementation=("triton", "xla")),
        [PARAMS, array(B, T, 128)],
    ),
}
FORWARD = {
    "swizzle_scales": (lambda s: swizzle_scales(s, token_axis=-3, **ONE), [array(B, T, H, 6, dtype=jnp.uint8)]),
    "vmap": (jax.vmap(lambda x: apply_rope(x, *tables(), rotary_dim=64, **ONE)), [array(5, B, T, H, 192)]),
    "scan": (
        lambda x: jax.lax.scan(lambda c, _: (apply_rope(c, *tables(), rotary_dim=64, **ONE), None), x, length=3),
        [X],
    ),
}


def calls(function, arguments) -> list[str]:
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @(\w+)", lowered.as_text())


def main(capability: int, *names: str) -> None:
    with compile_for(capability):
        found = {n: calls(with_gradients(f), a) for n, (f, a) in OPS.items() if n in names or not names}
        found |= {n: calls(f, a) for n, (f, a) in FORWARD.items() if n in names or not names}
    print(json.dumps({name: sum(target in TARGETS for target in targets) for name, targets in found.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
