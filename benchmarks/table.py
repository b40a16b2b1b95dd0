"""`python benchmarks/table.py RESULTS.json`: the table of docs/performance.md, which a test compares with it."""

import json
import sys

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
    ("q_up", "fwd", None): ("Q up-projection, forward", None),
    ("q_up", "bwd", None): ("Q up-projection, backward", 1.80),
    ("q_up_mxfp8", "fwd", None): ("the same in MXFP8, forward", None),
    ("q_up_mxfp8", "bwd", None): ("the same in MXFP8, backward", None),
    ("kv_up", "fwd", None): ("KV up-projection, forward", None),
    ("kv_up", "bwd", None): ("KV up-projection, backward", None),
    ("kv_up_mxfp8", "fwd", None): ("the same in MXFP8, forward", None),
    ("kv_up_mxfp8", "bwd", None): ("the same in MXFP8, backward", None),
}


def table(report: dict) -> str:
    """Markdown. Floor: what the bytes that must be moved, or the operations, take at the run's own ceiling, whichever
    is longer."""
    head = ["op", "floor", "goal", "ours", "by", *(name.replace("_", " ") for name in PEERS)]
    lines = [head, ["---"] * len(head)]
    for (op, direction, variant), (label, goal) in NAMES.items():
        key = (op, direction, variant)
        rows = {r["implementation"]: r for r in report["rows"] if (r["op"], r["pass"], r["variant"]) == key}
        ours = min((rows[name] for name in OURS if name in rows), key=lambda row: row["ms"])
        floor = f"{ours['ms'] * ours['fraction']:.3f}"
        peers = [f"{rows[name]['ms']:.3f}" if name in rows else "" for name in PEERS]
        best = [f"{ours['ms']:.3f}", ours["implementation"]]
        lines.append([label, floor, "" if goal is None else f"{goal:.3g}", *best, *peers])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(table(json.load(file)))
