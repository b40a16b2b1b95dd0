"""Compiles the fused up-projections for an H200 that is not there: `python tests/mosaic_programs.py` prints, as JSON,
what ptxas says of each kernel at DeepSeek-V3's shapes and how often its PTX has the instructions it is there for. A
process of its own, as `gpu_programs.py`."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from gpu_programs import gpus, use_compiler
from jax_mla.kernels.mosaic_up_proj import kv_up, kv_up_mxfp8, q_up, q_up_mxfp8

T, H, P = 8192, 128, 64
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async\S*",
    "load": r"cp\.async\.bulk\.tensor\S*global\.mbarrier\S*bytes ",
    "multicast": r"cp\.async\.bulk\.tensor\S*multicast::cluster",
    "codes": r"st\.global\.v2\.b32",
    "store": r"cp\.async\.bulk\.tensor\S*global\.shared\S*",
}


def main(*names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        use_compiler(folder)
        os.environ |= {"MOSAIC_GPU_CUDA_ROOT": str(folder), "MOSAIC_GPU_DUMP_TO": str(folder)}
        sharding = jax.sharding.SingleDeviceSharding(gpus("1x1x1")[0])

        def array(*shape, dtype=jnp.bfloat16):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        tables = [array(T, P // 2, dtype=jnp.float32)] * 2
        q, kv = [array(T, 1536), array(1536, H, 192), *tables], [array(T, 512), array(512, H, 256)]
        bias = array(H, 192, dtype=jnp.float32)
        copies = [array(*shape, dtype=jnp.uint8) for shape in ((T, P), (T, P // 32), (T, P), (T // 32, P))]
        programs = {
            "q": (q_up, q, dict(nope=128, rotary=P)),
            "q, pairs": (q_up, q, dict(nope=128, rotary=P, pairs=True)),
            "q, mxfp8": (q_up_mxfp8, q, dict(nope=128, rotary=P, pairs=True)),
            "q, pairs, bias": (q_up, [*q, bias], dict(nope=128, rotary=P, pairs=True)),
            "q, mxfp8, bias": (q_up_mxfp8, [*q, bias], dict(nope=128, rotary=P, pairs=True)),
            "kv": (kv_up, [*kv, array(T, P)], dict(nope=128, value=128)),
            "kv, mxfp8": (kv_up_mxfp8, [*kv, copies], dict(nope=128, value=128)),
        }
        names = names or programs
        print(json.dumps({name: compiled(folder, *programs[name]) for name in names}))


def compiled(folder: Path, function, arguments, sizes) -> dict:
    run = jax.jit(lambda *args: function(*args, heads=H, **sizes))
    run.trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    ptx, report = (max(folder.glob(f"*.{end}"), key=os.path.getmtime).read_text() for end in ("ptx", "ptxas"))
    counts = {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()}
    return counts | {
        "target": re.search(r"\.target\s+(\w+)", ptx)[1],
        "shapes": sorted(set(re.findall(r"wgmma\.mma_async\S*?(m\d+n\d+k\d+\.f32\.bf16\.bf16)", ptx))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
