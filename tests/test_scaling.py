"""What XLA compiled for 8, 64 and 256 GPUs is what arithmetic says, and docs/scaling.md what was compiled. All but the
last test read committed results."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import scaling, scaling_hlo, scaling_programs, scaling_table
from benchmarks import scaling_model as model
from benchmarks.scaling_model import BY_HEADS, PLANS, TOKENS, Plan
from jax_mla import MLAConfig
from jax_mla.params import specs

ROOT = Path(__file__).resolve().parent.parent
CARDS = ("h200", "b200")
RESULTS = ROOT / "benchmarks" / "results"
REPORTS = {card: json.loads((RESULTS / f"scaling-{card}.json").read_text()) for card in CARDS}
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
ROWS = [(card, row) for card, report in REPORTS.items() for row in report["rows"]]
each_row = pytest.mark.parametrize("card, row", ROWS, ids=lambda v: v if isinstance(v, str) else str(Plan(**v["mesh"])))


def programs(row: dict):
    """(what the arithmetic calls it, layers, the program) of all that was compiled for a mesh."""
    yield None, 1, row["layer"]
    for stack, program in row["stack"].items():
        yield stack, 61, program


def amounts(found: dict) -> Counter:
    """Bytes by kind, dtype and size of the group: XLA makes one array of several that are summed alike."""
    counted = Counter()
    for kind, arrays in found.items():
        for text, times in arrays.items():
            dtype, _, group = model.split(text)
            counted[kind, dtype, group] += times * model.size(text)
    return counted


def sorted_dims(arrays: dict) -> Counter:
    """Arrays whatever the order of their dims."""
    counted = Counter()
    for text, times in arrays.items():
        dtype, shape, group = model.split(text)
        counted[dtype, tuple(sorted(shape)), group] += times
    return counted


def test_the_arithmetic_is_of_deepseek_v3():
    wanted = {name: spec.shape for name, spec in specs(MLAConfig.deepseek_v3()).items()}
    assert {name: weight[0] for name, weight in model.WEIGHTS.items()} == {
        n: s for n, s in wanted.items() if len(s) > 1
    }
    assert sum(map(math.prod, wanted.values())) == model.parameters(Plan()) == 187_107_328
    remat = (ROOT / "docs" / "remat.md").read_text(encoding="utf-8")
    once = {"everything": 256, "latents": 4, "nothing": 4}  # tables or positions, of which all rows have one
    for name, bytes_ in once.items():
        (documented,) = re.findall(rf"\| `{name}` \|.*\| ([\d,]+) \|$", remat, re.MULTILINE)
        assert model.saved(Plan(), name) == TOKENS * (int(documented.replace(",", "")) - bytes_), name


@pytest.mark.parametrize("card", CARDS)
def test_every_mesh_was_compiled(card):
    report = REPORTS[card]
    assert [Plan(**row["mesh"]) for row in report["rows"]] == list(PLANS)
    assert [row["gpus"] for row in report["rows"]] == [plan.gpus for plan in PLANS]
    assert report["layers"] == model.LAYERS and report["memory_bytes"] == scaling_programs.CARDS[card]["memory"]
    for row in report["rows"]:
        assert tuple(row["stack"]) == model.stacks(Plan(**row["mesh"]))


@each_row
def test_what_a_gpu_is_given_and_gives(card, row):
    """To the byte; a program's results come with a table of pointers."""
    plan = Plan(**row["mesh"])
    layer = row["layer"]
    assert layer["argument_bytes"] == model.layer_arguments(plan)
    assert 0 <= layer["output_bytes"] - model.layer_outputs(plan) < 100
    for stack, program in row["stack"].items():
        assert program["argument_bytes"] == model.stack_arguments(plan), stack
        assert 0 <= program["output_bytes"] - program["aliased_bytes"] < 200, stack


@each_row
def test_what_a_gpu_says(card, row):
    """What is gathered array by array, all else by bytes of a dtype in groups of one size; and no activation."""
    plan = Plan(**row["mesh"])
    weights = {model.array("bf16", model.gathered(plan, name), g) for name in model.WEIGHTS for g in (plan.fsdp,)}
    for stack, layers, program in programs(row):
        found = program["collectives"]
        wanted = model.collectives(plan, stack and model.policy(stack), layers)
        assert found["all-gather"] == wanted["all-gather"], stack
        assert set(found["all-gather"]) <= weights, stack
        # By XLA's order of dims: it scatters along the first.
        assert sorted_dims(found["reduce-scatter"]) == sorted_dims(wanted["reduce-scatter"]), stack
        assert amounts(found) == amounts(wanted), stack


@each_row
def test_what_a_gpu_holds(card, row):
    """What grows with the layers is the arithmetic's; the rest is one layer at work, whatever their number."""
    plan = Plan(**row["mesh"])
    for stack, program in row["stack"].items():
        rest = program["temporary_bytes"] - sum(model.stack_temporaries(plan, stack).values())
        assert 1.4e9 < rest < 2.8e9, (stack, rest)
    if BY_HEADS in row["stack"]:
        less = row["stack"]["latents"]["temporary_bytes"] - row["stack"][BY_HEADS]["temporary_bytes"]
        copy = model.stack_temporaries(plan, "latents")["wo in another order"]
        assert abs(less - copy) < 0.05e9, "no copy of wo"


@each_row
def test_our_kernels_are_in_it(card, row):
    """cuDNN's attention both ways; on Hopper the fused up-projections, elsewhere RoPE and the split behind a GEMM."""
    calls = Counter(row["layer"]["custom_calls"])
    mosaic = 2 if card == "h200" else 0
    attention = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}
    assert calls == Counter(attention | {"mosaic_gpu_v2": mosaic, "triton_kernel_call": 7 if mosaic else 8})
    for stack in ("everything", "latents"):  # the same in every layer, attention never twice
        again = Counter(row["stack"][stack]["custom_calls"])
        assert all(again[target] == 61 for target in attention)
    assert row["stack"]["everything"]["custom_calls"] == {name: 61 * n for name, n in sorted(calls.items()) if n}


@each_row
def test_all_layers_fit(card, row):
    for stack, program in row["stack"].items():
        assert scaling_table.peak(program) < REPORTS[card]["memory_bytes"], stack


def test_the_page_is_the_committed_results():
    reports = [REPORTS[card] for card in CARDS]
    tables = scaling_table.layers(reports[0]), scaling_table.stacks(*reports), scaling_table.calls(*reports)
    for table in (*tables, scaling_table.by_heads(reports[0])):
        assert table in PAGE, table
    for report in reports:
        assert report["command"] in PAGE
        assert f"jax {report['versions']['jax']}" in PAGE
    # What the prose quotes.
    need = {str(Plan(**r["mesh"])): scaling_table.peak(r["stack"]["latents"]) / 2**30 for r in reports[0]["rows"]}
    said = {str(plan): sum(model.sent(kind, a) for kind, a in model.collectives(plan).items()) for plan in PLANS}
    for quoted in (
        f"{need['fsdp=256']:.1f} GiB on 256 GPUs",
        f"{need['fsdp=8']:.1f} on 8",
        f"{need['dp=32 x fsdp=8'] - need['fsdp=256']:.0f} GiB more",
        f"sends {said['fsdp=4 x tp=2'] / said['fsdp=8']:.2f} times as much as fsdp=8, for"
        f" {need['fsdp=4 x tp=2'] - need['fsdp=8']:.0f} GiB more",
        f"({model.network(Plan(fsdp=32, tp=8)) / 1e6:.0f} MB against {model.network(Plan(fsdp=256)) / 1e6:.0f})",
        f"{said['fsdp=8'] / 1e6:,.0f} MB that fsdp=8 sends take {said['fsdp=8'] / 450e6:.1f} ms",
    ):
        assert quoted in " ".join(PAGE.split()), quoted
    # Both cards' programs say the same.
    for ours, other in zip(*(report["rows"] for report in reports), strict=True):
        assert ours["layer"]["collectives"] == other["layer"]["collectives"]
    assert (ROOT / "docs" / "scaling.png").exists()


def test_collectives_are_read_from_text():
    """Every form that XLA writes: tuples, -start and -done, three ways to write groups, loops."""
    text = """
%wrapped (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %all-to-all.1 = bf16[8,4]{1,0} all-to-all(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
}

%body.1 (q: (s32[], f32[2])) -> (s32[], f32[2]) {
  %all-reduce-start = (f32[2]{0}, /*index=1*/f32[3,5]{1,0}) all-reduce-start(%a, %b), replica_groups=[2,4]<=[4,2]T(1,0)
  %all-reduce-start.1 = ((f32[7]{0}), f32[7]{0}) all-reduce-start(%d), replica_groups={{0,1}}, to_apply=%add
  %all-reduce-done = (f32[2]{0}, f32[3,5]{1,0}) all-reduce-done(%all-reduce-start)
  %s = f32[1,3]{1,0} reduce-scatter(%c), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %k = (bf16[2]{0}) custom-call(%a), custom_call_target="ours"
}

ENTRY %main (x: bf16[1,4]) -> bf16[8,4] {
  %g = ((bf16[1,4]{1,0}, bf16[2]{0}), (bf16[8,4]{1,0}, bf16[16]{0})) all-gather-start(%x, %y), replica_groups=mesh['axis_0'=8,'axis_1'=2], device_ids=([2,8]T(1,0)) {'axis_0'}, dimensions={0}
  %h = (f32[1]{0}, f32[4]{0}) all-gather-start(%z), replica_groups=mesh['a'=8] {'a':(2)4}, dimensions={0}
  %i = bf16[6]{0} all-gather(%z), replica_groups={{0,1,2}}, dimensions={0}
  %j = (f32[2]{0}, f32[2]{0}) collective-permute-start(%z), source_target_pairs={{0,1},{1,0}}
  %async = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}) async-start(%x), calls=%wrapped
  %w = (s32[], f32[2]{0}) while(%t), condition=%cond, body=%body.1, backend_config={"known_trip_count":{"n":"61"}}
  %k = (bf16[2]{0}) custom-call(%a), custom_call_target="another"
}
"""  # noqa: E501
    assert scaling_hlo.collectives(text) == {
        "all-gather": {"bf16[16] over 8": 1, "bf16[6] over 3": 1, "bf16[8,4] over 8": 1, "f32[4] over 4": 1},
        "all-reduce": {"f32[2] over 4": 61, "f32[3,5] over 4": 61, "f32[7] over 2": 61},
        "all-to-all": {"bf16[8,4] over 2": 1},
        "collective-permute": {"f32[2] over 1": 1},
        "reduce-scatter": {"f32[8,3] over 8": 61},
    }
    assert scaling_hlo.custom_calls(text, ("ours",)) == {"ours": 61}
    with pytest.raises(ValueError, match="number of turns"):
        scaling_hlo.collectives(text.replace("known_trip_count", "unknown"))
    with pytest.raises(ValueError, match="group of replicas"):
        scaling_hlo.collectives(text.replace("{{0,1,2}}", "?"))


def test_bytes_that_are_sent():
    """By the ring: what is gathered and what is scattered once but for the GPU's own part, a sum both ways."""
    arrays = {"f32[8,2] over 8": 3}
    assert model.total(arrays) == 192
    assert [model.sent(kind, arrays) for kind in model.KINDS[:4]] == [168, 168, 336, 168]
    assert model.sent("collective-permute", {"bf16[5] over 1": 2}) == 20
    assert model.network(Plan(fsdp=8)) == model.network(Plan(fsdp=4, tp=2)) == 0, "one machine"
    # Through the network a copy a machine says as much as FSDP over all of them.
    assert model.network(Plan(dp=32, fsdp=8)) == pytest.approx(model.network(Plan(fsdp=256)), rel=1e-3)


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(scaling_programs, "_importable", lambda module: module != "jax_plugins.xla_cuda13")
    with pytest.raises(SystemExit):
        scaling.main(["--gpus", "8"])
    assert "found no jax-cuda13-pjrt, wanted what extra `cuda` installs" in capsys.readouterr().err


EXAMPLE = [json.loads((RESULTS / f"scaling-example-{card}.json").read_text()) for card in CARDS]


@pytest.mark.parametrize("report", EXAMPLE, ids=CARDS)
def test_the_examples_training_step(report):
    """Four blocks of DeepSeek-V3's dims by the example's own `train_step`: its attention says what the arithmetic says,
    the rest gathers weights alone, and once."""
    M, F, vocabulary, layers = model.M, report["ffn_dim"], 256, report["layers"]
    for row in report["rows"]:
        plan, step = Plan(**row["mesh"]), row["step"]
        spread = 3 * layers * M * F + 2 * vocabulary * M  # over fsdp and tp
        numbers = layers * (model.parameters(plan) + 2 * M) + M + spread // (plan.fsdp * plan.tp)
        batch = model.rows(plan) * (TOKENS + 1)  # bytes of text
        assert step["argument_bytes"] == 3 * 4 * numbers + batch + 2 * 4, "parameters, moments, windows, counters"
        found, wanted = step["collectives"], model.collectives(plan, None, layers)
        gathered = Counter(found["all-gather"])
        gathered.subtract(wanted["all-gather"])
        mlp = {("bf16", tuple(sorted((M, F // plan.tp))), plan.fsdp): 3 * layers}
        ends = {(d, tuple(sorted((M, vocabulary // plan.tp))), plan.fsdp): 1 for d in ("bf16", "f32")}
        assert +sorted_dims(gathered) == Counter(mlp | ends)
        scattered = sorted_dims(found["reduce-scatter"])
        scattered.subtract(sorted_dims(wanted["reduce-scatter"]))
        assert +scattered == Counter(mlp | ends)
        bf16 = {text: n for text, n in wanted.get("all-reduce", {}).items() if text.startswith("bf16")}
        assert all(found["all-reduce"][text] >= n for text, n in bf16.items())
        assert step["custom_calls"]["__cudnn$fmhaSoftmaxBackward"] == layers
    assert report["command"] in PAGE
    if report["card"] == "h200":
        assert scaling_table.example(report) in PAGE


COMPILED = """
import json
from benchmarks import scaling, scaling_programs
from benchmarks.scaling_model import Plan
scaling_programs.missing()
with scaling_programs.Compiler() as compiler:
    for scaling_programs.TOKEN_AXIS in (None, "tp"):
        print(json.dumps(scaling.described(compiler.layer("h200", Plan(fsdp=4, tp=2)))))
"""


def test_compiled_again(monkeypatch):
    """One layer over eight H200s, by the jax that is installed; and with x's tokens spread over tp."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which it adds
    reason = scaling_programs.missing()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found, spread = map(json.loads, done.stdout.splitlines()[-2:])
    plan = Plan(fsdp=4, tp=2)
    assert found["argument_bytes"] == model.layer_arguments(plan)
    assert amounts(found["collectives"]) == amounts(model.collectives(plan))
    assert found["custom_calls"]["__cudnn$fmhaSoftmax"] == 1
    # Sequence parallelism: latents and y's cotangent are gathered besides, y scattered where it was summed.
    tokens = {n: f"bf16[2,{TOKENS},{n}] over 2" for n in (model.M, model.R, model.C + model.P)}
    gathered = found["collectives"]["all-gather"] | dict.fromkeys(tokens.values(), 1)
    assert spread["collectives"]["all-gather"] == gathered
    assert spread["collectives"]["reduce-scatter"][tokens[model.M]] == 1
    assert tokens[model.M] not in spread["collectives"]["all-reduce"]
    assert spread["custom_calls"] == found["custom_calls"]
