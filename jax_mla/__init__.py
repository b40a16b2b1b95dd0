"""DeepSeek-style Multi-head Latent Attention for JAX.

Functions: `mla` (the layer), `init`, and its ops `rope_tables`, `apply_rope`, `apply_rope_kv`, `rms_norm`,
`q_up_proj_rope`, `kv_up_proj_rope`, `attention`; MXFP8 tensors: `quantize_mxfp8`, `dequantize`, `rms_norm_quantize`,
`quantize_params`, `quantize_swizzled`, `swizzle_scales`, `unswizzle_scales`; FP8 with one scale a tensor:
`quantize_fp8`, `FP8Recipe`, and with one for every block of 128: `quantize_fp8_block`, `FP8BlockRecipe`. Generation:
`init_cache`, `prefill`, `decode` and their `LatentCache`. `zigzag`: the order of tokens for context parallelism.
`qk_clip` for Muon. `compile_for`: kernels for a GPU that is not here. Flax modules: `jax_mla.linen.MLA`,
`jax_mla.nnx.MLA` (import them by name: this package itself needs no Flax). Checkpoints: `jax_mla.convert`.

Shapes: B batch, T query length, S key length, M hidden size, H heads, R q_lora_rank, C kv_lora_rank,
N qk_nope_head_dim, P qk_rope_head_dim, V v_head_dim, D = N + P.
"""

from jax_mla import convert
from jax_mla.attention import attention
from jax_mla.clip import qk_clip
from jax_mla.config import MLAConfig, RopeConfig, YarnScaling
from jax_mla.context import zigzag
from jax_mla.decode import LatentCache, decode, init_cache, prefill
from jax_mla.dequantize import dequantize
from jax_mla.dispatch import implementations
from jax_mla.ffi.triton import compile_for
from jax_mla.fp8 import quantize_fp8
from jax_mla.fp8_block import quantize_fp8_block
from jax_mla.fp8_block_tensor import FP8BlockTensor
from jax_mla.fp8_tensor import FP8Tensor
from jax_mla.kv_up import kv_up_proj_rope
from jax_mla.layer import mla
from jax_mla.mxfp8 import quantize_mxfp8
from jax_mla.mxfp8_tensor import MXFP8Tensor
from jax_mla.norm import rms_norm
from jax_mla.norm_quantize import rms_norm_quantize
from jax_mla.params import init, logical_axes, quantize_params
from jax_mla.q_up import q_up_proj_rope
from jax_mla.quantize_swizzled import quantize_swizzled
from jax_mla.recipes import FP8BlockRecipe, FP8Recipe
from jax_mla.remat import policy as remat_policy
from jax_mla.rope import apply_rope, rope_tables
from jax_mla.rope_kv import apply_rope_kv
from jax_mla.segments import segment_ids_from_cu_seqlens
from jax_mla.swizzle import swizzle_scales, unswizzle_scales

__version__ = "0.1.0"

__all__ = [
    "FP8BlockRecipe",
    "FP8BlockTensor",
    "FP8Recipe",
    "FP8Tensor",
    "LatentCache",
    "MLAConfig",
    "MXFP8Tensor",
    "RopeConfig",
    "YarnScaling",
    "apply_rope",
    "apply_rope_kv",
    "attention",
    "compile_for",
    "convert",
    "decode",
    "dequantize",
    "implementations",
    "init",
    "init_cache",
    "kv_up_proj_rope",
    "logical_axes",
    "mla",
    "prefill",
    "q_up_proj_rope",
    "qk_clip",
    "quantize_fp8",
    "quantize_fp8_block",
    "quantize_mxfp8",
    "quantize_params",
    "quantize_swizzled",
    "remat_policy",
    "rms_norm",
    "rms_norm_quantize",
    "rope_tables",
    "segment_ids_from_cu_seqlens",
    "swizzle_scales",
    "unswizzle_scales",
    "zigzag",
]
