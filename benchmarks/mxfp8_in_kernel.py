"""Attention's forward pass on MXFP8 operands on one GPU, two ways: a Triton kernel that turns codes into bfloat16 as it
reads them, and dequantising first, for cuDNN. `python -m benchmarks.mxfp8_in_kernel RESULT.json`.

Dense and causal only, and nothing else uses it: it is here to be measured.
"""

import datetime
import functools
import json
import sys

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax_mla.ffi.triton import call
from jax_mla.kernels.attention import LOG2E, parts
from jax_mla.kernels.launch import Launch, cdiv
from jax_mla.kernels.mxfp8 import decode, spread

import jax_mla
from benchmarks import __main__ as report
from benchmarks import peers, timing
from benchmarks.cases import rms_error

B, T, H, D, V = 2, 4096, 128, 192, 128
TILES = ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2))


@triton.jit
def rowwise(codes, scales, token, start: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """[tokens, SIZE] of a head from dim `start` on, blocks along the dims."""
    dim, block = start + tl.arange(0, SIZE), start // 32 + tl.arange(0, SIZE // 32)
    values = tl.load(codes + token[:, None] * (H * D) + dim[None, :])
    scale = tl.load(scales + token[:, None] * (H * D // 32) + block[None, :])
    return decode(values, spread(scale, 32)).to(tl.bfloat16)


@triton.jit
def columnwise(codes, scales, start, BN: tl.constexpr, H: tl.constexpr, V: tl.constexpr):
    """[BN, V] of a head from token `start` on, blocks along the tokens."""
    dim = tl.arange(0, V)
    values = tl.load(codes + (start + tl.arange(0, BN))[:, None] * (H * V) + dim[None, :])
    scale = tl.load(scales + (start // 32 + tl.arange(0, BN // 32))[:, None] * (H * V) + dim[None, :])
    wide = tl.reshape(tl.broadcast_to(scale[:, None, :], (BN // 32, 32, V)), (BN, V))
    return decode(values, wide).to(tl.bfloat16)


@triton.jit
def keys(total, largest, acc, q0, q1, k, k_scales, v, v_scales, row, low, high, MASKED: tl.constexpr, H: tl.constexpr,
         D: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
         BN: tl.constexpr):  # fmt: skip
    for start in range(low, high, BN):
        key = start + tl.arange(0, BN)
        logits = tl.dot(q0, tl.trans(rowwise(k, k_scales, key, 0, D0, H, D)))
        logits = tl.dot(q1, tl.trans(rowwise(k, k_scales, key, D0, D1, H, D)), logits)
        if MASKED:
            logits = tl.where(key[None, :] <= row[:, None], logits, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, axis=1))
        p = tl.exp2((logits - new[:, None]) * (SCALE * LOG2E))
        shrink = tl.exp2((largest - new) * (SCALE * LOG2E))
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(tl.bfloat16), columnwise(v, v_scales, start, BN, H, V), acc * shrink[:, None])
        largest = new
    return total, largest, acc


@triton.jit
def forward_kernel(q, q_scales, k, k_scales, v, v_scales, o, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
                   V: tl.constexpr, SCALE: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr):  # fmt: skip
    block = T // BM - 1 - tl.program_id(0) % (T // BM)
    pair = (tl.program_id(0) // (T // BM)).to(tl.int64)
    batch, head = pair // H, pair % H
    row = block * BM + tl.arange(0, BM)
    at, at_v = (batch * T * H + head) * D, (batch * T * H + head) * V
    k, k_scales = k + at, k_scales + at // 32
    v, v_scales = v + at_v, v_scales + (batch * (T // 32) * H + head) * V
    q0 = rowwise(q + at, q_scales + at // 32, row, 0, D0, H, D)
    q1 = rowwise(q + at, q_scales + at // 32, row, D0, D1, H, D)
    total, largest = tl.zeros((BM,), tl.float32), tl.full((BM,), float("-inf"), tl.float32)
    acc = tl.zeros((BM, V), tl.float32)
    whole = block * BM // BN * BN
    total, largest, acc = keys(total, largest, acc, q0, q1, k, k_scales, v, v_scales, row, 0, whole, False, H, D, V,
                               SCALE, D0, D1, BN)  # fmt: skip
    total, largest, acc = keys(total, largest, acc, q0, q1, k, k_scales, v, v_scales, row, whole, (block + 1) * BM,
                               True, H, D, V, SCALE, D0, D1, BN)  # fmt: skip
    to = o + at_v + row[:, None] * (H * V) + tl.arange(0, V)[None, :]
    tl.store(to, (acc / total[:, None]).to(tl.bfloat16))


def in_kernel(tile, *copies):
    bm, bn, warps, stages = tile
    d0, d1 = parts(D)
    constants = dict(T=T, H=H, D=D, V=V, SCALE=D**-0.5, D0=d0, D1=d1, BM=bm, BN=bn)
    launch = Launch(forward_kernel, (B * H * cdiv(T, bm),), (((B, T, H, V), "bfloat16"),), tuple(constants.items()),
                    warps, stages)  # fmt: skip
    return call(launch, *copies)[0]


def main(path: str) -> None:
    draws = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(k, (B, T, H, n), jnp.bfloat16) for k, n in zip(draws, (D, D, V), strict=True)]
    usages = ("rowwise", "rowwise", "columnwise")

    def quantize(x, usage):
        return jax_mla.quantize_mxfp8(x, usage=usage, token_axis=-3).detach()

    tensors = [jax.jit(quantize, static_argnums=1)(*pair) for pair in zip(arrays, usages, strict=True)]
    copies = [
        jax.lax.bitcast_convert_type(a, jnp.uint8) if a.dtype != jnp.uint8 else a
        for t, u in zip(tensors, usages, strict=True)
        for a in t.copy(u)
    ]
    values = [jax_mla.dequantize(t, jnp.float32) for t in tensors]
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(peers.attention_exact)(*values)
    candidates = {"cudnn": (functools.partial(jax_mla.attention, implementation="cudnn"), tensors)}
    candidates |= {f"triton {tile}": (functools.partial(in_kernel, tile), copies) for tile in TILES}
    timed, errors = {}, {}
    for name, (function, args) in candidates.items():
        compiled = jax.jit(function).lower(*args).compile()
        errors[name] = rms_error(compiled(*args), wanted)
        timed[name] = timing.Timed(functools.partial(compiled, *args), calls=4)
    rows = []
    for name, (ms, quartiles) in timing.side_by_side(timed, 10).items():
        row = {"op": "attention_mxfp8", "pass": "fwd", "preset": "deepseek_v3", "tokens": B * T, "variant": "in kernel"}
        row |= dict(implementation=name, ms=ms, spread=quartiles, error=errors[name], peak_bytes=None)
        rows.append(row | dict(tflops=None, gbps=None, ceiling=None, fraction=None))
        print(f"{name:28} {ms:.3f} {quartiles:.3f} {errors[name]:.1e}", flush=True)
    found = dict(device=report._device(), versions=report._versions(), xla_flags="", rows=rows)
    found |= dict(command="python -m benchmarks.mxfp8_in_kernel", date=datetime.date.today().isoformat())
    with open(path, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
