"""Every attention layer of a whole DeepseekV3ForCausalLM, on the activations and cotangents that the model gives it."""

import numpy as np
import pytest
import test_parity_document as document
import test_parity_hf as hf

from jax_mla import MLAConfig, convert, mla

pytestmark = pytest.mark.golden

B, T, VOCABULARY, LAYERS = 2, 29, 61, 3
SETTINGS = dict(
    vocab_size=VOCABULARY,
    num_hidden_layers=LAYERS,
    first_k_dense_replace=1,  # then mixtures of experts
    intermediate_size=52,
    moe_intermediate_size=20,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
)
# Attention's implementation in torch (sdpa is the model's default), padding on the left and right of its rows, and more
# of the config.
CASES = {
    "eager, q LoRA, bias": ("eager", None, dict(q_lora_rank=hf.Q_RANK, attention_bias=True)),
    "sdpa, q LoRA, bias, padding": ("sdpa", (6, 9), dict(q_lora_rank=hf.Q_RANK, attention_bias=True)),
    "eager, no q LoRA, halves, padding": ("eager", (6, 9), dict(q_lora_rank=None, rope_interleave=False)),
}
MLPS = ["dense", "experts", "experts"]

TITLE = "Whole model, float32"
TEXT = f"""
Fails above {document.bound(hf.TOLERANCE)}. Each attention layer of a `DeepseekV3ForCausalLM` with random weights, on
the input, positions and mask that the model gives it and on the cotangent that comes back from its logits, against
`mla` with the layer's part of the model's state dict and `MLAConfig.from_hf(model.config.to_dict())`. {LAYERS} layers:
one with a dense MLP, two with experts; YaRN.
"""
ROWS = [f"{case}: layer {layer} ({MLPS[layer]})" for case in CASES for layer in range(LAYERS)]
SECTIONS = [document.Section(TITLE, TEXT, ROWS, hf.COLUMNS)]


def run_model(case):
    """Its config and state dict, which tokens are real, and each attention layer's input, cotangent and results."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    implementation, padding, more = CASES[case]
    torch.set_float32_matmul_precision("highest")
    settings = {**hf.HF, **SETTINGS, **more, "rope_parameters": dict(hf.YARN)}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings, attn_implementation=implementation)).eval()
    state = hf.weights(model, seed=23)
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, strict=True)
    assert [type(layer.mlp).__name__ for layer in model.model.layers] == [
        "DeepseekV3MLP" if mlp == "dense" else "DeepseekV3MoE" for mlp in MLPS
    ]
    seen = {}

    def keep(layer):
        def hook(module, args, kwargs, outputs):
            seen[layer] = kwargs["hidden_states"], outputs[0]
            for tensor in seen[layer]:
                tensor.retain_grad()

        return hook

    for layer, block in enumerate(model.model.layers):
        block.self_attn.register_forward_hook(keep(layer), with_kwargs=True)
    rng = np.random.default_rng(29)
    real = np.ones((B, T), bool)
    if padding:
        real[0, : padding[0]] = real[1, -padding[1] :] = False
    tokens = torch.tensor(rng.integers(0, VOCABULARY, (B, T)))
    logits = model(input_ids=tokens, attention_mask=torch.tensor(real).long() if padding else None).logits
    cotangent = np.where(real[..., None], rng.normal(size=logits.shape), 0).astype(np.float32)
    logits.backward(torch.tensor(cotangent))
    layers = []
    for layer, block in enumerate(model.model.layers):
        x, y = seen[layer]
        gradients = {name: p.grad.numpy() for name, p in block.self_attn.named_parameters()}
        golden = np.where(real[..., None], y.detach().numpy(), 0), {"hidden_states": x.grad.numpy(), **gradients}
        layers.append((x.detach().numpy(), y.grad.numpy(), golden))
    return model.config.to_dict(), {name: value.numpy() for name, value in model.state_dict().items()}, real, layers


@pytest.mark.parametrize("case", CASES)
def test_every_layer(case, tmp_path_factory):
    settings, state, real, layers = run_model(case)
    config = MLAConfig.from_hf(settings)
    ids = None if real.all() else real.astype(np.int32)
    run = hf.differentiate(lambda params, x, positions: mla(params, x, config, segment_ids=ids))
    assert len(layers) == LAYERS
    for layer, (x, cotangent, golden) in enumerate(layers):
        prefix = f"model.layers.{layer}.self_attn."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        errors = hf.relative_errors(hf.run_ours(run, config, own, None, x, cotangent), golden)
        hf.assert_within(errors)
        document.report(tmp_path_factory, TITLE, f"{case}: layer {layer} ({MLPS[layer]})", errors)


def test_the_whole_state_dict_is_refused():
    """A prefix forgotten is named, not guessed."""
    settings, state, _, _ = run_model(next(iter(CASES)))
    with pytest.raises(ValueError, match="found keys with the prefix 'model.layers.0.self_attn.' and 2 more"):
        convert.from_hf(state, MLAConfig.from_hf(settings))
