"""The dimensions of an MLA layer, in Hugging Face's and DeepSeek's names."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from jax_mla import checks


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's g(m) = 0.1 m ln(factor) + 1 for factor > 1, else 1 (DeepSeek-V2, section 3.1.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _set(instance: Any, name: str, value: Any) -> None:
    """Stores the checked value, in one canonical type, on a frozen dataclass (so 1 and 1.0 hash to one jit entry)."""
    object.__setattr__(instance, name, value)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's extension of RoPE to longer contexts (Peng et al. 2023, arXiv:2309.00071), in DeepSeek's form.

    factor: how many times longer than `original_max_position_embeddings` (tokens) the context becomes.
    beta_fast, beta_slow: rotations over the original context above which a frequency is kept, below which it is divided
      by `factor`; a linear ramp between.
    mscale, mscale_all_dim: cos and sin are multiplied by `attention_factor`, by default g(mscale) / g(mscale_all_dim);
      the softmax scale by g(mscale_all_dim)^2 (by 1 where mscale_all_dim is 0); g(m) = 0.1 m ln(factor) + 1.
    attention_factor: overrides that default.
    truncate: round the ramp's ends to whole dims (DeepSeek and Hugging Face do).

    Raises TypeError or ValueError for a value that is not a finite number or out of range (beta_fast < beta_slow too).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        _set(self, "factor", checks.static_float("factor", self.factor, 1.0))
        name = "original_max_position_embeddings"
        _set(self, name, checks.static_int(name, self.original_max_position_embeddings, 1))
        for name in ("beta_fast", "beta_slow"):
            _set(self, name, checks.static_float(name, getattr(self, name), 0.0, exclusive=True))
        if self.beta_fast < self.beta_slow:
            raise checks.found("beta_fast", self.beta_fast, f"at least beta_slow, which is {self.beta_slow}")
        for name in ("mscale", "mscale_all_dim"):
            _set(self, name, checks.static_float(name, getattr(self, name), 0.0))
        if self.attention_factor is not None:
            _set(self, "attention_factor", checks.static_float("attention_factor", self.attention_factor, 0.0, True))
        _set(self, "truncate", checks.static_bool("truncate", self.truncate))

    @property
    def table_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta`, optional YaRN `scaling`, and whether the rotary dims come as adjacent pairs
    (`interleave=True`, every published DeepSeek checkpoint) or as halves."""

    theta: float = 10000.0
    scaling: YarnScaling | None = None
    interleave: bool = True

    def __post_init__(self):
        _set(self, "theta", checks.static_float("theta", self.theta, 1.0, exclusive=True))
        if self.scaling is not None and not isinstance(self.scaling, YarnScaling):
            raise TypeError(f"scaling: found {checks.show(self.scaling)}, wanted a YarnScaling or None")
        _set(self, "interleave", checks.static_bool("interleave", self.interleave))

    @property
    def input_layout(self) -> str:
        """The layout `apply_rope` reads: "pairs" or "halves"."""
        return "pairs" if self.interleave else "halves"


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """One Multi-head Latent Attention layer (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    hidden_size M; num_heads H; q_lora_rank R (None: no query low rank, the queries come straight from x);
    kv_lora_rank C; qk_nope_head_dim N; qk_rope_head_dim P (even); v_head_dim V; norm_eps of both latent norms;
    attention_bias: biases on the two down-projections and the output projection, as Hugging Face has them.

    Frozen and hashable: equal configs are one jit cache entry. Raises TypeError or ValueError naming the field.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    attention_bias: bool = False
    rope: RopeConfig = RopeConfig()

    def __post_init__(self):
        for name in ("hidden_size", "num_heads", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"):
            _set(self, name, checks.static_int(name, getattr(self, name), 1))
        _set(self, "qk_nope_head_dim", checks.static_int("qk_nope_head_dim", self.qk_nope_head_dim, 0))
        if self.q_lora_rank is not None:
            _set(self, "q_lora_rank", checks.static_int("q_lora_rank", self.q_lora_rank, 1))
        if self.qk_rope_head_dim % 2:
            raise checks.found("qk_rope_head_dim", self.qk_rope_head_dim, "an even number (RoPE rotates pairs)")
        _set(self, "norm_eps", checks.static_float("norm_eps", self.norm_eps, 0.0))
        _set(self, "attention_bias", checks.static_bool("attention_bias", self.attention_bias))
        if not isinstance(self.rope, RopeConfig):
            raise TypeError(f"rope: found {checks.show(self.rope)}, wanted a RopeConfig")

    @property
    def qk_head_dim(self) -> int:
        """D = N + P, Hugging Face's meaning of the name (Megatron-Core's is N alone)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(N + P)^-0.5, times YaRN's g(mscale_all_dim)^2."""
        scaling = self.rope.scaling
        return self.qk_head_dim**-0.5 * (scaling.softmax_factor if scaling is not None else 1.0)

    @classmethod
    def deepseek_v3(cls) -> "MLAConfig":
        """DeepSeek-V3 and R1, as published (YaRN from 4,096 to 163,840 tokens)."""
        yarn = YarnScaling(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
        return cls(7168, 128, 1536, 512, 128, 64, 128, rope=RopeConfig(scaling=yarn))

    @classmethod
    def deepseek_v2_lite(cls) -> "MLAConfig":
        """DeepSeek-V2-Lite, as published: no query low rank."""
        yarn = YarnScaling(factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
        return cls(2048, 16, None, 512, 128, 64, 128, rope=RopeConfig(scaling=yarn))

    @classmethod
    def tiny(cls) -> "MLAConfig":
        """For tests and first steps on a CPU; every dim is a multiple of 32, as MXFP8 blocks want."""
        return cls(128, 4, 64, 32, 32, 32, 32)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | os.PathLike) -> "MLAConfig":
        """Reads a Hugging Face DeepSeek V2/V3-style config: a dict, or the path of `config.json` or of its folder.

        Takes `rope_scaling` with `type` or `rope_type`, and `rope_parameters`. `q_lora_rank` 0 is None. `norm_eps` is
        1e-6 whatever `rms_norm_eps` says: Hugging Face's latent norms ignore it. Where Hugging Face's rule for YaRN's
        attention factor differs from DeepSeek's (one of mscale, mscale_all_dim missing or 0), the result carries
        Hugging Face's as `attention_factor`.

        Raises ValueError for a missing or null field, a scaling other than none and YaRN, and a key-value head count
        other than the head count; OSError and ValueError for a file that cannot be read or is not a JSON object.
        """
        if isinstance(config, str | os.PathLike):
            config = _read_json(config)
        if not isinstance(config, Mapping):
            raise TypeError(f"config: found {type(config).__name__}, wanted a dict or a path to config.json")

        def field(name):
            if config.get(name) is None:
                raise ValueError(f"config: found no value for {name!r}, wanted a DeepSeek V2/V3-style config")
            return config[name]

        heads = field("num_attention_heads")
        kv_heads = config.get("num_key_value_heads")
        if kv_heads is not None and kv_heads != heads:
            raise checks.found("num_key_value_heads", kv_heads, f"num_attention_heads, which is {heads}")
        return cls(
            hidden_size=field("hidden_size"),
            num_heads=heads,
            q_lora_rank=config.get("q_lora_rank") or None,
            kv_lora_rank=field("kv_lora_rank"),
            qk_nope_head_dim=field("qk_nope_head_dim"),
            qk_rope_head_dim=field("qk_rope_head_dim"),
            v_head_dim=field("v_head_dim"),
            attention_bias=_bool(config, "attention_bias", False),
            rope=_rope_from_hf(config),
        )


def _bool(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    return False if value is None else checks.static_bool(name, value)


def _rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise checks.found(name, value, "a dict or null")
    source = "rope_scaling" if old else "rope_parameters"
    fields = old or new or {}  # transformers lets the older spelling win, too
    thetas = (fields.get("rope_theta"), config.get("rope_theta"), (new or {}).get("rope_theta"))
    theta = next((theta for theta in thetas if theta is not None), 10000.0)
    # A missing rope_interleave is DeepSeek's pairs; transformers takes a null for false.
    rope = RopeConfig(theta=theta, interleave=_bool(config, "rope_interleave", True))
    if fields.get("partial_rotary_factor") not in (None, 1):
        raise checks.found(f"{source} partial_rotary_factor", fields["partial_rotary_factor"], "1 or none")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind == "default":
        return rope
    if kind != "yarn":
        raise checks.found(f"{source} type", kind, "'default' or 'yarn'")
    original = config.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    if original is None:
        raise ValueError(f"{source}: found no original_max_position_embeddings, which YaRN wants")
    original = checks.static_int("original_max_position_embeddings", original, 1)
    factor = fields.get("factor")
    if factor is None:
        if config.get("max_position_embeddings") is None:
            raise ValueError(f"{source}: found no factor and no max_position_embeddings, wanted one of them")
        factor = checks.static_int("max_position_embeddings", config["max_position_embeddings"], 1) / original
    factor = checks.static_float("factor", factor, 1.0)
    mscale, mscale_all_dim = fields.get("mscale"), fields.get("mscale_all_dim")
    attention_factor = fields.get("attention_factor")
    if attention_factor is None and not (mscale and mscale_all_dim):
        attention_factor = _mscale(factor, 1.0)
    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fields.get("beta_fast") or 32,
        beta_slow=fields.get("beta_slow") or 1,
        mscale=1.0 if mscale is None else mscale,
        mscale_all_dim=mscale_all_dim or 0.0,
        attention_factor=attention_factor,
        truncate=_bool(fields, "truncate", True),
    )
    return dataclasses.replace(rope, scaling=scaling)


def _read_json(path: str | os.PathLike) -> Any:
    path = os.fspath(path)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file)
        except ValueError as error:
            raise ValueError(f"config: found {path!r}, which is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"config: found {path!r}, which holds a {type(config).__name__}, wanted a JSON object")
    return config
