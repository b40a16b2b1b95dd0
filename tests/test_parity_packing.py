"""Padding and packed rows: segment_ids against Hugging Face's DeepseekV3Attention under the mask that says the same."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_parity_document as document
import test_parity_hf as hf

from jax_mla import MLAConfig, attention, mla

pytestmark = pytest.mark.golden

# Runs of equal ids, row by row; 0 is padding.
PADDED = [[(0, 9), (1, 28)], [(1, 23), (0, 14)], [(0, 4), (1, 30), (0, 3)]]
PACKED = [[(3, 12), (1, 1), (2, 24)], [(7, 17), (8, 15), (0, 5)], [(0, 2), (1, 11), (0, 6), (2, 18)]]
KINDS = {"padded": (PADDED, False), "packed": (PACKED, False), "packed, positions with gaps": (PACKED, True)}
CASES = [hf.MODULE_CASE, "no q LoRA, halves, theta 500"]

TITLE, CU_TITLE = "Padding and packed rows, float32", "attention with cu_seqlens, float32"
CU_ROWS = ["causal", "not causal"]
MODULE_ROW = f"linen.MLA: padded: {hf.MODULE_CASE}"
TEXT = f"""
Fails above {document.bound(hf.TOLERANCE)}. Golden: a 4D additive mask that hides padding (left, right and on both
sides; different lengths) or is block-diagonal and causal (packed), positions that restart with each segment or leave
gaps in it. Ours: segment_ids, and at padding NaN in x and a random cotangent, which reach nothing. Real tokens' outputs
and all gradients.
"""
CU_TEXT = f"""
Fails above {document.bound(hf.TOLERANCE)}. Packed tokens without a batch dim, one sequence empty and some padding last,
against Hugging Face's eager attention under a block-diagonal mask.
"""
SECTIONS = [
    document.Section(TITLE, TEXT, [*(f"{kind}: {case}" for kind in KINDS for case in CASES), MODULE_ROW], hf.COLUMNS),
    document.Section(CU_TITLE, CU_TEXT, CU_ROWS, ["forward", "q", "k", "v"]),
]


def row_of(runs):
    return np.repeat(*np.transpose(runs))


def additive(ids, causal=True):
    """[B, 1, T, T] as Hugging Face has it: the most negative float32 (not -inf, which leaves NaN where all is hidden).
    Written as a list of runs, unlike anything of ours."""
    mask = np.full((len(ids), 1, ids.shape[1], ids.shape[1]), np.finfo(np.float32).min, np.float32)
    for b, row in enumerate(ids):
        start = 0
        while start < len(row):
            end = start
            while end < len(row) and row[end] == row[start]:
                end += 1
            if row[start] != 0:
                block = mask[b, 0, start:end, start:end]
                block[np.tri(end - start, dtype=bool) if causal else ...] = 0.0
            start = end
    return mask


def restarting(runs_of_rows, rng=None):
    """Positions [B, T], from 0 in every run; with an rng from anywhere and with gaps."""

    def run(length):
        return np.arange(length) if rng is None else rng.integers(0, 300) + np.cumsum(rng.integers(1, 5, length))

    return np.stack([np.concatenate([run(length) for _, length in runs]) for runs in runs_of_rows])


def compare(kind, case, apply, seed):
    rows, gaps = KINDS[kind]
    theirs = hf.golden_config(case)
    config = MLAConfig.from_hf(theirs.to_dict())
    state = hf.parameters(theirs, seed)
    _, x, cotangent = hf.inputs(config, seed + 1)
    ids = np.stack([row_of(row) for row in rows])
    assert ids.shape == x.shape[:2]
    positions = restarting(rows, np.random.default_rng(seed) if gaps else None)
    real = (ids != 0)[..., None]
    golden = hf.run_golden(theirs, state, positions, x, np.where(real, cotangent, 0), mask=additive(ids))
    run = hf.differentiate(lambda params, x, positions: apply(params, x, config, positions, jnp.asarray(ids)))
    x = np.where(real, x, np.nan).astype(np.float32)
    y, gradients = hf.run_ours(run, config, state, positions if gaps else None, x, cotangent)
    assert not np.any(y[ids == 0]) and not np.any(gradients["hidden_states"][ids == 0])
    return hf.relative_errors((y, gradients), (np.where(real, golden[0], 0), golden[1]))


def apply_mla(params, x, config, positions, ids):
    return mla(params, x, config, positions=positions, segment_ids=ids)


def apply_linen(params, x, config, positions, ids):
    from jax_mla import linen

    return linen.MLA(config).apply({"params": params}, x, positions=positions, segment_ids=ids)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_segment_ids(kind, case, tmp_path_factory):
    errors = compare(kind, case, apply_mla, seed=11)
    hf.assert_within(errors)
    document.report(tmp_path_factory, TITLE, f"{kind}: {case}", errors)


def test_flax_module(tmp_path_factory):
    errors = compare("padded", hf.MODULE_CASE, apply_linen, seed=13)
    hf.assert_within(errors)
    document.report(tmp_path_factory, TITLE, MODULE_ROW, errors)


def test_the_comparison_sees_one_token_in_the_wrong_segment():
    def shifted(params, x, config, positions, ids):
        return mla(params, x, config, positions=positions, segment_ids=ids.at[0, 12].set(3))

    errors = compare("packed, positions with gaps", hf.MODULE_CASE, shifted, seed=11)
    assert errors["forward"] > 1000 * hf.TOLERANCE and errors["kv_b_proj.weight"] > 1000 * hf.TOLERANCE


@pytest.mark.parametrize("row", CU_ROWS)
def test_cu_seqlens(row, tmp_path_factory):
    import torch
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import eager_attention_forward

    causal, scale = row == "causal", 0.31
    boundaries, T, H = np.asarray([0, 8, 8, 9, 32]), 37, 3
    ids = row_of([(1, 8), (2, 1), (3, 23), (0, 5)])[None]
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(2, T, H, 20)).astype(np.float32)
    v, cotangent = rng.normal(size=(2, T, H, 14)).astype(np.float32)

    # Hugging Face has heads before tokens and a batch dim.
    leaves = [torch.tensor(a.swapaxes(0, 1)[None].copy(), requires_grad=True) for a in (q, k, v)]
    module = types.SimpleNamespace(num_key_value_groups=1, training=False)
    o, _ = eager_attention_forward(module, *leaves, torch.tensor(additive(ids, causal)), scale)
    real = (ids[0] != 0)[:, None, None]
    o.backward(torch.tensor(np.where(real, cotangent, 0))[None])
    wanted = [np.where(real, o[0].detach().numpy(), 0), *(a.grad[0].numpy().swapaxes(0, 1) for a in leaves)]

    @jax.jit
    def run(q, k, v, boundaries):
        o, pullback = jax.vjp(lambda *a: attention(*a, scale=scale, causal=causal, cu_seqlens=boundaries), q, k, v)
        return o, *pullback(jnp.asarray(cotangent))

    found = run(q, k, v, jnp.asarray(boundaries))
    errors = hf.relative_errors(*((a[0], dict(zip("qkv", a[1:], strict=True))) for a in (found, wanted)))
    hf.assert_within(errors)
    document.report(tmp_path_factory, CU_TITLE, row, errors)
