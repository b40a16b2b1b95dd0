"""The presets: every number that makes a run what it is, in one table."""

import dataclasses

from flax_examples.model import ModelConfig
from jax_mla import MLAConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    about: str
    model: ModelConfig
    window: int  # bytes a prediction can look back on, and the bytes predicted in a window
    batch: int  # windows a step
    steps: int
    learning_rate: float  # the peak, reached after the warm-up
    eval_bytes: int = 128 * 1024  # held-out bytes scored, the same ones each time
    weight_decay: float = 0.1  # on matrices only
    warmup: float = 0.05  # of the steps; then a cosine to 0
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0  # of the gradient's global norm


def _model(hidden: int, layers: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, ffn: int):
    attention = MLAConfig(
        hidden_size=hidden,
        num_heads=heads,
        q_lora_rank=q_rank,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=nope,
    )
    return ModelConfig(attention=attention, layers=layers, ffn_dim=ffn)


PRESETS = {
    "tiny": Preset(
        about="seconds; for tests and for trying options",
        model=_model(hidden=32, layers=2, heads=2, q_rank=24, kv_rank=16, nope=8, rope=8, ffn=64),
        window=32,
        batch=8,
        steps=40,
        learning_rate=1e-2,
        eval_bytes=4 * 1024,
    ),
    "small": Preset(
        about="three minutes on two CPU cores",
        model=_model(hidden=160, layers=3, heads=4, q_rank=64, kv_rank=48, nope=32, rope=16, ffn=432),
        window=128,
        batch=8,
        steps=800,
        learning_rate=3e-3,
    ),
    "medium": Preset(
        about="a longer run: tens of minutes on two CPU cores",
        model=_model(hidden=256, layers=4, heads=4, q_rank=128, kv_rank=64, nope=48, rope=16, ffn=688),
        window=256,
        batch=8,
        steps=2000,
        learning_rate=2e-3,
    ),
    "large": Preset(
        about="one GPU (--dtype bfloat16)",
        model=_model(hidden=768, layers=12, heads=6, q_rank=384, kv_rank=256, nope=128, rope=64, ffn=2048),
        window=1024,
        batch=32,
        steps=2000,
        learning_rate=6e-4,
        eval_bytes=1024 * 1024,
    ),
}
