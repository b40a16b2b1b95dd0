"""bfloat16: ours and Hugging Face's DeepseekV3Attention, each against the float32 golden of the same numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
import test_parity_document as document
import test_parity_hf as hf

from jax_mla import MLAConfig, mla

pytestmark = pytest.mark.golden

CASES = [
    "q LoRA, bias, pairs, YaRN",
    "q LoRA, halves, YaRN",
    "no q LoRA, bias, pairs, YaRN",
    "no q LoRA, halves, theta 500",
]
SEEDS = range(8)
# Roundings between x and y: a latent, its norm, its heads, RoPE, probabilities, o, y and one to spare for how they add
# up; a gradient has passed as many again on its way back. Each moves a number by at most 2^-9 of it.
TOLERANCE = {"forward": 8 * 2.0**-9, "gradients": 16 * 2.0**-9}
# The largest error of one run is a matter of luck: up to twice apart, either way, of models that are equally good. Its
# mean over the runs is not, nor is the root mean square, where ours has to be as good.
LARGEST, MEAN_SQUARE = 1.5, 1.1

TITLE, SQUARE_TITLE = "bfloat16, largest error", "bfloat16, root mean square error"
WHO = ("Hugging Face", "ours, bfloat16 parameters", "ours, float32 parameters")
ROWS = [f"{case}: {who}" for case in CASES for who in WHO]
TEXT = f"""
Weights, x and cotangent rounded to bfloat16; the golden is Hugging Face's module in float32 on those numbers. Against
it: Hugging Face's module in bfloat16, and ours with x in bfloat16 and parameters of either dtype. The largest error in
{len(SEEDS)} runs. Fails above {document.figure(TOLERANCE["forward"])} forward and
{document.figure(TOLERANCE["gradients"])} for a gradient (8 and 16 roundings), and where
the mean of the runs' largest errors is above {LARGEST} times Hugging Face's.
"""
SQUARE_TEXT = f"""
The same runs: the root mean square of the errors of all of them, relative to the golden's. Fails above {MEAN_SQUARE}
times Hugging Face's.
"""
SECTIONS = [
    document.Section(TITLE, TEXT, ROWS, hf.COLUMNS, document.figure),
    document.Section(SQUARE_TITLE, SQUARE_TEXT, ROWS, hf.COLUMNS, document.figure),
]


def rounded(array):
    return np.asarray(jnp.asarray(array, jnp.bfloat16).astype(jnp.float32))


def compare(case):
    """By (who, tensor): the runs' largest errors, and the root mean square error of all runs."""
    theirs = hf.golden_config(case)
    config = MLAConfig.from_hf(theirs.to_dict())
    run = hf.differentiate(lambda params, x, positions: mla(params, x, config, positions=positions))
    largest, squares = {}, {}
    for seed in SEEDS:
        state = {name: rounded(value) for name, value in hf.parameters(theirs, seed).items()}
        positions, x, cotangent = hf.inputs(config, seed + 1)
        given = (state, positions, rounded(x), rounded(cotangent))
        golden = hf.run_golden(theirs, *given)
        results = (
            hf.run_golden(theirs, *given, dtype="bfloat16"),
            hf.run_ours(run, config, *given, dtype="bfloat16"),
            hf.run_ours(run, config, *given, dtype="bfloat16", param_dtype="float32"),
        )
        for who, result in zip(WHO, results, strict=True):
            for name, error in hf.relative_errors(result, golden).items():
                found, wanted = (a[0] if name == "forward" else a[1][name] for a in (result, golden))
                largest.setdefault((who, name), []).append(error)
                pair = np.sum((found - wanted) ** 2, dtype=np.float64), np.sum(wanted**2, dtype=np.float64)
                squares.setdefault((who, name), []).append(pair)
    return largest, {key: float(np.sqrt(np.divide(*np.sum(pairs, axis=0)))) for key, pairs in squares.items()}


@pytest.mark.parametrize("case", CASES)
def test_bfloat16(case, tmp_path_factory):
    largest, square = compare(case)
    wrong = {}
    for (who, name), errors in largest.items():
        theirs = WHO[0], name
        ratios = np.mean(errors) / np.mean(largest[theirs]), square[who, name] / square[theirs]
        limit = TOLERANCE["forward" if name == "forward" else "gradients"]
        if who != WHO[0] and not (max(errors) <= limit and ratios[0] <= LARGEST and ratios[1] <= MEAN_SQUARE):
            wrong[who, name] = max(errors), ratios
    assert not wrong, wrong
    if "bias" in case:
        # A sum over tokens of numbers that are exact: a float32 parameter's gradient is never rounded to bfloat16.
        assert max(largest[WHO[2], "o_proj.bias"]) <= hf.TOLERANCE < max(largest[WHO[1], "o_proj.bias"])
    for who in WHO:
        rows = ({name: figures[w, name] for w, name in figures if w == who} for figures in (largest, square))
        for title, row in zip((TITLE, SQUARE_TITLE), rows, strict=True):
            row = {name: float(np.max(value)) for name, value in row.items()}
            document.report(tmp_path_factory, title, f"{case}: {who}", row)
