"""What each remat policy saves, counted from the residuals' shapes at DeepSeek-V3 dims without allocating anything."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judge import assert_close, assert_same, draw

from jax_mla import MLAConfig, init, mla, remat_policy

POLICIES = ("everything", "qkv", "latents", "nothing")
TOKENS = 4096
DOCS = Path(__file__).resolve().parent.parent / "docs" / "remat.md"
BYTES = {"bf16": 2, "f32": 4, "i32": 4}


def saved_per_token(remat, capsys) -> tuple[float, float]:
    """Bytes a token that the backward pass keeps: the layer's own residuals, and its input."""
    config = MLAConfig.deepseek_v3()
    params = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, TOKENS, config.hidden_size), jnp.bfloat16)
    capsys.readouterr()
    jax.ad_checkpoint.print_saved_residuals(lambda p, x: mla(p, x, config, remat=remat), params, x)
    own = given = 0
    for line in capsys.readouterr().out.splitlines():
        dtype, shape, source = re.fullmatch(r"(\w+)\[([\d,]*)\] (.*)", line).groups()
        size = BYTES[dtype] * int(np.prod([int(n) for n in shape.split(",") if n]))
        if "from the argument x" in source:
            given += size
        elif "from the argument" not in source and "constant" not in source:  # no parameter, no table of frequencies
            own += size
    return own / TOKENS, given / TOKENS


def test_saved_bytes_per_token(capsys):
    found = {remat: saved_per_token(remat, capsys) for remat in POLICIES}
    H, D, V, R, C, P, M = 128, 192, 128, 1536, 512, 64, 7168
    kept, positions = 2 * (R + C + P) + 2 * H * V + 4 * H, 4  # latents, attention's output and lse
    assert found["nothing"] == (positions, 2 * M)
    assert found["latents"] == (kept + positions, 2 * M)
    assert found["qkv"] == (kept + 2 * H * (2 * D + V) + positions, 2 * M)
    # Every residual: also two rstd and the tables, but no positions.
    assert found["everything"] == (kept + 2 * H * (2 * D + V) + 2 * 4 + 2 * 4 * P // 2, 2 * M)
    assert found["everything"][0] >= 4 * found["latents"][0]
    text = DOCS.read_text(encoding="utf-8")
    for remat, (own, given) in found.items():
        row = re.search(rf"^\| `{remat}` \|.*$", text, re.MULTILINE).group()
        assert f"| {own:,.0f} | {own + given:,.0f} |" in row, row


CONFIG = MLAConfig(48, 3, 32, 16, 16, 8, 24, norm_eps=1e-3)


def layer_inputs():
    rng = np.random.default_rng(0)
    params = {n: v + 0.1 * draw(rng, *v.shape) for n, v in init(jax.random.key(0), CONFIG).items()}
    return params, draw(rng, 2, 12, 48), draw(rng, 2, 12, 48)


def step(function):
    def run(params, x, c):
        value, pullback = jax.vjp(function, params, x)
        return value, pullback(c)

    return jax.jit(run)


@functools.cache
def compiled(remat):
    return step(lambda p, x: mla(p, x, CONFIG, remat=remat)).lower(*layer_inputs()).compile()


def test_every_policy_gives_the_same_gradients():
    args = layer_inputs()
    plain = compiled(None)(*args)
    assert_same(compiled("everything")(*args), plain)
    for remat in POLICIES:
        assert_close(compiled(remat)(*args), plain, 1e-6)


def exponentials(remat):
    return len(re.findall(r" exponential\(", compiled(remat).as_text()))


def test_attention_runs_forward_once_where_its_output_is_kept():
    """An exponential of the logits and one of their decay forward, one backward: two more if attention ran again."""
    assert [exponentials(remat) for remat in POLICIES] == [3, 3, 3, 5]


def test_policies_for_the_users_own_checkpoint():
    args = layer_inputs()
    plain = compiled(None)(*args)
    outside = step(lambda p, x: jnp.tanh(mla(p, jnp.sin(x), CONFIG)))(*args)
    for policy in (remat_policy("latents"), remat_policy("everything"), jax.checkpoint_policies.dots_saveable):
        inside = jax.checkpoint(lambda p, x: jnp.tanh(mla(p, jnp.sin(x), CONFIG)), policy=policy)
        assert_close(step(inside)(*args), outside, 1e-6)
    unknown = jax.checkpoint_policies.save_only_these_names("no_such_name", "attention_out")
    assert_close(step(jax.checkpoint(lambda p, x: mla(p, x, CONFIG), policy=unknown))(*args), plain, 1e-6)


def test_unknown_policies_are_named():
    params, x, _ = layer_inputs()
    with pytest.raises(
        ValueError, match="remat: found 'full', wanted one of None, 'everything', 'latents', 'qkv', 'no"
    ):
        mla(params, x, CONFIG, remat="full")
    with pytest.raises(ValueError, match="remat: found None"):
        remat_policy(None)
