"""`python -m benchmarks.scaling_table H200.json B200.json [PICTURE.png]`: the tables of docs/scaling.md, which a test
compares with it, and its picture (extra `bench`), from what `benchmarks.scaling` wrote."""

import sys

from benchmarks.scaling_model import (
    BY_HEADS,
    F32,
    KINDS,
    REMATS,
    Plan,
    network,
    parameters,
    sent,
    stack_temporaries,
    total,
)
from benchmarks.table import read

MB, GIB = 1e6, 2**30


def peak(program: dict) -> int:
    """Bytes that a GPU must have for it: outputs that are donated arguments are those."""
    outputs = program["output_bytes"] - program["aliased_bytes"]
    return program["argument_bytes"] + outputs + program["temporary_bytes"]


def layers(report: dict) -> str:
    """Markdown: one layer, forward and backward, on each GPU."""
    head = ["GPUs", "mesh", "arguments", "temporaries", "gathered", "scattered", "summed", "moved", "sent", "network"]
    lines = []
    for row in report["rows"]:
        plan, layer = Plan(**row["mesh"]), row["layer"]
        found = [layer["collectives"].get(kind, {}) for kind in KINDS]
        gather, scatter, reduce, *moved = (total(arrays) / MB for arrays in found)
        sums = sum(sent(kind, arrays) for kind, arrays in zip(KINDS, found, strict=True))
        cells = [layer["argument_bytes"] / MB, layer["temporary_bytes"] / MB, gather, scatter, reduce, sum(moved)]
        cells += [sums / MB, network(plan) / MB]
        lines.append([str(row["gpus"]), str(plan), *(f"{n:,.0f}" for n in cells)])
    return _markdown(head, lines)


def stacks(*reports: dict) -> str:
    """Markdown: a step of Adam through all layers, on each GPU of the cards."""
    cards = [report["card"].upper() for report in reports]
    head = ["GPUs", "mesh", "parameters, moments", "gradients"]
    head += [f"{remat}: {card}" for remat in REMATS for card in cards]
    lines = []
    for rows in zip(*(report["rows"] for report in reports), strict=True):
        plan, count = Plan(**rows[0]["mesh"]), reports[0]["layers"]
        kept = count * parameters(plan) * F32
        cells = [f"{3 * kept / GIB:.1f}", f"{kept / GIB:.1f}"]
        for remat in REMATS:
            for row, report in zip(rows, reports, strict=True):
                size = peak(row["stack"][remat])
                cells.append(f"{size / GIB:.1f}" + " (too much)" * (size > report["memory_bytes"]))
        lines.append([str(rows[0]["gpus"]), str(plan), *cells])
    return _markdown(head, lines)


def calls(*reports: dict) -> str:
    """Markdown: which kernels a layer's forward and backward passes call, the same under every mesh."""
    found = {report["card"].upper(): report["rows"][0]["layer"]["custom_calls"] for report in reports}
    for report in reports:
        if any(row["layer"]["custom_calls"] != found[report["card"].upper()] for row in report["rows"]):
            raise ValueError(f"{report['card']}: found other kernels under other meshes, wanted the same")
    targets = sorted({target for each in found.values() for target in each})
    return _markdown(
        ["custom call", *found], [[f"`{t}`", *(str(c.get(t, 0)) for c in found.values())] for t in targets]
    )


def example(report: dict) -> str:
    """Markdown: the example's training step on each GPU."""
    head = ["GPUs", "mesh", "arguments", "temporaries", "gathered", "scattered", "summed", "sent"]
    lines = []
    for row in report["rows"]:
        step = row["step"]
        found = [step["collectives"].get(kind, {}) for kind in KINDS]
        sizes = [step["argument_bytes"], step["temporary_bytes"], *(total(arrays) for arrays in found[:3])]
        sizes.append(sum(sent(kind, arrays) for kind, arrays in zip(KINDS, found, strict=True)))
        lines.append([str(row["gpus"]), str(Plan(**row["mesh"])), *(f"{n / MB:,.0f}" for n in sizes)])
    return _markdown(head, lines)


def by_heads(report: dict) -> str:
    """Markdown: what fsdp over the heads of wo saves."""
    lines = []
    for row in report["rows"]:
        if BY_HEADS in row["stack"]:
            before, after = (row["stack"][name]["temporary_bytes"] / GIB for name in ("latents", BY_HEADS))
            cells = [f"{before:.2f}", f"{after:.2f}", f"{before - after:.2f}"]
            lines.append([str(row["gpus"]), str(Plan(**row["mesh"])), *cells])
    return _markdown(["GPUs", "mesh", "fsdp over wo's last dim", "over its heads", "less"], lines)


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


def picture(path: str, report: dict) -> None:
    """What a GPU holds in a step with remat="latents", and what it sends for a layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{row['gpus']}: {Plan(**row['mesh'])}" for row in report["rows"]]
    held = {name: [] for name in ("parameters", "Adam's moments", "gradients", "saved", "wo in another order", "rest")}
    said = {kind: [] for kind in KINDS}
    for row in report["rows"]:
        plan, program = Plan(**row["mesh"]), row["stack"]["latents"]
        kept = report["layers"] * parameters(plan) * F32
        parts = {"parameters": kept, "Adam's moments": 2 * kept} | stack_temporaries(plan, "latents", report["layers"])
        parts["rest"] = peak(program) - sum(parts.values())
        for name in held:
            held[name].append(parts[name] / GIB)
        for kind in KINDS:
            said[kind].append(sent(kind, row["layer"]["collectives"].get(kind, {})) / MB)
    figure, sides = pyplot.subplots(1, 2, figsize=(11, 0.36 * len(labels) + 1.6), sharey=True)
    for axes, parts, title in (
        (sides[0], held, f"GiB a GPU: {report['layers']} layers, Adam, remat='latents'"),
        (sides[1], said, "MB a GPU sends for a layer, forward and backward"),
    ):
        left = [0.0] * len(labels)
        for name, sizes in parts.items():
            if any(sizes):
                axes.barh(range(len(labels)), sizes, left=left, label=name)
                left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", alpha=0.4)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=8)
    sides[0].set_yticks(range(len(labels)), labels)
    sides[0].invert_yaxis()
    figure.text(0.995, 0.005, f"{report['device']}, compiled, not run", ha="right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    results = read(sys.argv[1:])
    if "step" in results[0]["rows"][0]:
        sys.exit(print(example(results[0])))
    print(layers(results[0]), stacks(*results), calls(*results), by_heads(results[0]), sep="\n\n")
    if sys.argv[-1].endswith(".png"):
        picture(sys.argv[-1], results[0])
