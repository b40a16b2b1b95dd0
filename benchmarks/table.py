"""`python benchmarks/table.py RESULTS.json ... [PICTURE.png]`: the tables of docs/performance.md, which a test compares
with it, and the picture of ops (extra `bench`). Of an op that several results have, the last counts."""

import json
import sys
from pathlib import Path

OURS = ("mosaic", "triton", "cudnn")
PEERS = ("xla", "jnp_best", "jnp_usual")

# (op, pass, variant): what it is called, and the milliseconds we set out to reach on an H200 with 2 x 4096 tokens.
NAMES = {
    ("rope_q", "fwd", "halves"): ("RoPE of queries, in place", 0.11),
    ("rope_kv", "fwd", None): ("KV split + RoPE, forward", 0.31),
    ("rope_kv", "bwd", None): ("KV split + RoPE, backward", 0.31),
    ("rope_mxfp8", "fwd", None): ("RoPE + MXFP8 both ways", 0.30),
    ("rms_norm_mxfp8", "fwd", "latent"): ("RMSNorm + MXFP8 both ways, [8192, 1536]", 0.03),
    ("rms_norm_mxfp8", "fwd", "hidden"): ("RMSNorm + MXFP8 both ways, [8192, 7168]", 0.115),
    ("dequantize", "fwd", "rowwise"): ("dequantise queries, row-wise", 0.22),
    ("dequantize", "fwd", "columnwise"): ("dequantise queries, column-wise", 0.22),
    ("q_up", "fwd", None): ("Q up-projection, forward", 0.90),
    ("q_up", "bwd", None): ("Q up-projection, backward", 1.80),
    ("q_up_mxfp8", "fwd", None): ("Q up-projection in MXFP8, forward", 1.05),
    ("q_up_mxfp8", "bwd", None): ("Q up-projection in MXFP8, backward", None),
    ("kv_up", "fwd", None): ("KV up-projection, forward", 0.55),
    ("kv_up", "bwd", None): ("KV up-projection, backward", None),
    ("kv_up_mxfp8", "fwd", None): ("KV up-projection in MXFP8, forward", 0.70),
    ("kv_up_mxfp8", "bwd", None): ("KV up-projection in MXFP8, backward", None),
}


# The layer's ops, and what they are called.
LAYERS = {"layer": "bfloat16", "layer_mxfp8": "MXFP8"}


def measured(*reports: dict):
    """label, goal, floor, the row of our fastest kernel, and milliseconds by peer, of each op. Floor: what the bytes
    that must be moved, or the operations, take at the run's own ceiling, whichever is longer."""
    for (op, direction, variant), (label, goal) in NAMES.items():
        key = (op, direction, variant)
        by_report = [[r for r in report["rows"] if (r["op"], r["pass"], r.get("variant")) == key] for report in reports]
        rows = {r["implementation"]: r for r in [found for found in by_report if found][-1]}
        ours = min((rows[name] for name in OURS if name in rows), key=lambda row: row["ms"])
        peers = {name: rows[name]["ms"] for name in PEERS if name in rows}
        yield label, goal, ours["ms"] * ours["fraction"], ours, peers


LAYER_PEERS = ("jnp_best", "jnp_unpadded", "jnp_usual")


def layers(*reports: dict) -> str:
    """Markdown: the whole layer, ours as `None` chooses."""
    names = [name.replace("_", " ") for name in LAYER_PEERS]
    head = ["layer", "tokens", "pass", "ours", *names, *(f"{n.removeprefix('jnp ')} / ours" for n in names)]
    head += ["MiB: ours", "best"]
    lines = []
    rows = [r for report in reports for r in report["rows"] if r["op"] in LAYERS]
    for key in dict.fromkeys((r["op"], r["preset"], r["tokens"], r["pass"]) for r in rows):
        op, preset, tokens, direction = key
        found = {r["implementation"]: r for r in rows if (r["op"], r["preset"], r["tokens"], r["pass"]) == key}
        ours, peers = found["best"], [found.get(name) for name in LAYER_PEERS]
        name = f"{preset.replace('deepseek_', '').replace('_', ' ')}, {LAYERS[op]}"
        line = [name, f"{tokens:,}", direction.replace("fwd_bwd", "both").replace("fwd", "forward")]
        line += [f"{r['ms']:.2f} ± {r['spread'] / 2:.2f}" if r else "" for r in (ours, *peers)]
        line += [f"{r['ms'] / ours['ms']:.2f}" if r else "" for r in peers]
        lines.append(line + [f"{r['peak_bytes'] / 2**20:,.0f}" for r in (ours, found["jnp_best"])])
    return _markdown(head, lines)


# Of FP8, (op, pass, variant): what it is called.
FP8 = {
    ("fp8_quantize", "fwd", "known amax"): "attention's output to FP8, both ways round, amax known",
    ("fp8_quantize", "fwd", "amax too"): "the same, and amax",
    ("q_up_fp8", "fwd", None): "norm, Q up-projection, RoPE",
    ("q_up_fp8", "fwd", "quantized"): "the same, of a quantised weight",
    ("q_up_fp8", "bwd", None): "their backward pass",
    ("layer_fp8", "fwd", None): "the layer's output",
    ("layer_fp8", "fwd_bwd", None): "the layer's output and all gradients",
}
FP8_LAYER = ("own", "quantized", "codes")


def fp8(report: dict) -> str:
    """Markdown: FP8, ours by Triton's kernels and, of the layer, as `None` chooses; beside it ours in bfloat16 ("own"),
    of quantised weights, and keeping codes of all that attention reads and gives; and the peers, in bfloat16 but for
    what quantises."""
    names = ("best", "triton", "xla", *FP8_LAYER, *LAYER_PEERS)
    lines = []
    for (op, direction, variant), label in FP8.items():
        rows = [r for r in report["rows"] if (r["op"], r["pass"], r.get("variant")) == (op, direction, variant)]
        found = {r["implementation"]: f"{r['ms']:.3f} ± {r['spread'] / 2:.3f}" for r in rows}
        if found:
            lines.append([label, *(found.get(name, "") for name in names)])
    names = ("ours", "triton", "xla", "bfloat16", "quantised weights", "codes", *LAYER_PEERS)
    return _markdown(["FP8", *(name.replace("_", " ") for name in names)], lines)


# (op, variant): what it is called.
ATTENTIONS = {
    ("attention", None): "2 rows of 4,096",
    ("attention", "max_logit"): "the same, and largest logits",
    ("attention_mxfp8", None): "the same, of MXFP8",
    ("attention_packed", "packed"): "8 x 1,024 packed",
    ("attention_packed", "uneven"): "8 of 512 to 1,280 packed",
    ("attention_packed", "batch"): "8 rows of 1,024",
    ("attention_packed", "one_row"): "one row of 8,192",
}


def attentions(report: dict) -> str:
    """Markdown: attention by each implementation."""
    names = ("cudnn", "triton", "xla", "jnp_best", "jnp_usual")
    lines = []
    for (op, variant), label in ATTENTIONS.items():
        for direction in ("fwd", "fwd_bwd"):
            key = (op, variant, direction)
            rows = [r for r in report["rows"] if (r["op"], r.get("variant"), r["pass"]) == key]
            found = {r["implementation"]: r for r in rows}
            if found:
                cells = [f"{found[n]['ms']:.2f}" if n in found else "" for n in names]
                sizes = [f"{found[n]['peak_bytes'] / 2**20:,.0f}" if n in found else "" for n in ("cudnn", "triton")]
                lines.append([label, direction.replace("fwd_bwd", "both").replace("fwd", "forward"), *cells, *sizes])
    head = ["attention", "pass", *(n.replace("_", " ") for n in names), "MiB: cudnn", "triton"]
    return _markdown(head, lines)


def table(*reports: dict) -> str:
    """Markdown: ops."""
    head = ["op", "floor", "goal", "ours", "by", *(name.replace("_", " ") for name in PEERS)]
    lines = []
    for label, goal, floor, ours, peers in measured(*reports):
        by_peer = [f"{peers[name]:.3f}" if name in peers else "" for name in PEERS]
        best = [f"{ours['ms']:.3f}", ours["implementation"]]
        lines.append([label, f"{floor:.3f}", "" if goal is None else f"{goal:.3g}", *best, *by_peer])
    return _markdown(head, lines)


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


def picture(path: str, *reports: dict) -> None:
    """Each time as a multiple of its floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = list(measured(*reports))
    marks = {"ours": ("o", "tab:blue", 70), "jnp_best": ("|", "tab:orange", 120), "jnp_usual": ("x", "tab:red", 45)}
    figure, axes = pyplot.subplots(figsize=(9, 0.34 * len(found) + 1.4))
    for name, (marker, color, size) in marks.items():
        times = [ours["ms"] if name == "ours" else peers[name] for _, _, _, ours, peers in found]
        over = [ms / floor for ms, (_, _, floor, _, _) in zip(times, found, strict=True)]
        axes.scatter(over, range(len(found)), marker=marker, c=color, s=size, label=name.replace("_", " "), zorder=2)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(found)), [f"{label} ({floor:.2f} ms)" for label, _, floor, _, _ in found])
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = [1, 1.5, 2, 3, 5, 8, 12]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.grid(axis="x", alpha=0.4)
    axes.set_xlabel(f"time over the floor, which is in brackets ({reports[-1]['device']})", loc="right")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def read(names: list[str]) -> list[dict]:
    """The reports among files."""
    return [json.loads(Path(name).read_text(encoding="utf-8")) for name in names if name.endswith(".json")]


if __name__ == "__main__":
    results = read(sys.argv[1:])
    ops = {row["op"] for report in results for row in report["rows"]}
    if ops & {op for op, *_ in FP8}:
        print(fp8(*results))
    elif ops & {op for op, _ in ATTENTIONS}:
        print(attentions(*results))
    elif ops & set(LAYERS):
        print(layers(*results))
    else:
        print(table(*results))
        if sys.argv[-1].endswith(".png"):
            picture(sys.argv[-1], *results)
