"""On an NVIDIA GPU: the layer in bfloat16 by our kernels, and Hugging Face's DeepseekV3Attention in bfloat16 on the
same GPU, each against Hugging Face's in float32."""

import jax
import numpy as np
import pytest
import test_parity_bf16 as bf16
import test_parity_hf as hf

from jax_mla import MLAConfig, mla

pytestmark = [pytest.mark.gpu, pytest.mark.golden]

# Heads as DeepSeek-V3's, for which all kernels are; fewer of them, and an odd number.
SIZES = dict(hidden_size=512, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SIZES |= dict(num_attention_heads=5, num_key_value_heads=5, max_position_embeddings=10240)
SEEDS = range(3)


@pytest.mark.parametrize("implementation", [None, ("triton", "xla")])
@pytest.mark.parametrize("rank", [384, None])
def test_the_layer(rank, implementation):
    from transformers import DeepseekV3Config

    settings = SIZES | dict(q_lora_rank=rank, attention_bias=True, rope_parameters=hf.YARN, attn_implementation="eager")
    theirs = DeepseekV3Config(**settings)
    config = MLAConfig.from_hf(theirs.to_dict())
    run = hf.differentiate(lambda p, x, at: mla(p, x, config, positions=at, implementation=implementation))
    largest = {}
    for seed in SEEDS:
        state = {name: bf16.rounded(value) for name, value in hf.parameters(theirs, seed).items()}
        rng = np.random.default_rng(seed)
        positions = rng.integers(0, 300, (2, 1)) + np.cumsum(rng.integers(1, 5, (2, 384)), axis=1)
        x, cotangent = (bf16.rounded(a) for a in rng.normal(size=(2, 2, 384, config.hidden_size)))
        given = (state, positions, x, cotangent)
        golden = hf.run_golden(theirs, *given)
        results = {
            "theirs": hf.run_golden(theirs, *given, dtype="bfloat16", device="cuda"),
            "ours": hf.run_ours(run, config, *given, dtype="bfloat16", param_dtype="float32"),
        }
        for who, result in results.items():
            for name, error in hf.relative_errors(result, golden).items():
                largest.setdefault(name, {}).setdefault(who, []).append(error)
    print(jax.devices()[0].device_kind, rank, implementation, largest)
    wrong = {}
    for name, errors in largest.items():
        limit = bf16.TOLERANCE["forward" if name == "forward" else "gradients"]
        if max(errors["ours"]) > limit or np.mean(errors["ours"]) > bf16.LARGEST * np.mean(errors["theirs"]):
            wrong[name] = errors
    assert not wrong, wrong
