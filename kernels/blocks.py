"""Block sizes and warps: data, tuned offline, by GPU architecture and by how much there is to do.

Every process takes the same. Any gives the same bits, but for the order of `split_backward`'s sum over heads.
Measured on one H200 (compute capability 9.0) at DeepSeek-V3's shapes and smaller ones. An architecture without a table
of its own, Blackwell among them, takes Hopper's: not measured there.
"""

from typing import NamedTuple


class Blocks(NamedTuple):
    size: int  # columns of a tile of 32 rows, or of a square one; of ops on heads, the heads a program has at once
    warps: int


class Tile(NamedTuple):
    """Of attention: queries a program has, keys it reads at once, warps, and how many reads are under way."""

    queries: int
    keys: int
    warps: int
    stages: int


HOPPER = 90
ANY = float("inf")
SHORT = 2048  # tokens up to which rows are short to attention

# By architecture and op: (elements below which it holds, blocks), in order; of attention tiles.
TABLES = {
    HOPPER: {
        # Two warps share 32 rows by 128 columns: wider rows of codes, or more values a thread, run out of registers.
        "quantize both": ((ANY, Blocks(128, 2)),),
        "quantize columnwise": ((ANY, Blocks(128, 2)),),
        "quantize rowwise": ((2**24, Blocks(128, 4)), (ANY, Blocks(256, 4))),
        # Not timed: as many warps a multiprocessor as registers leave.
        "quantize values": ((ANY, Blocks(128, 4)),),
        "norm_quantize": ((ANY, Blocks(128, 2)),),
        "rope_quantize": ((ANY, Blocks(128, 2)),),
        "dequantize": ((ANY, Blocks(256, 4)),),
        "rope": ((ANY, Blocks(128, 8)),),
        "split": ((ANY, Blocks(128, 8)),),
        "split_backward": ((ANY, Blocks(16, 8)),),
        # Square tiles.
        "fp8 quantize": ((ANY, Blocks(128, 8)),),
        # Rows of a tile of at most 128 dims.
        "fp8 heads": ((ANY, Blocks(128, 8)),),
        # By the numbers a head's keys and values are read as: what is read at once is in shared memory.
        "attention forward": ((320, Tile(128, 64, 8, 3)), (ANY, Tile(64, 32, 4, 2))),
        "attention forward, short": ((320, Tile(128, 64, 8, 3)), (ANY, Tile(64, 32, 4, 2))),
        "attention forward, packed": ((320, Tile(128, 64, 8, 3)), (ANY, Tile(64, 32, 4, 2))),
        "attention dq": ((320, Tile(128, 64, 8, 3)), (ANY, Tile(64, 32, 4, 2))),
        "attention dq, short": ((320, Tile(64, 32, 4, 3)), (ANY, Tile(64, 32, 4, 2))),
        "attention dq, packed": ((320, Tile(64, 32, 4, 3)), (ANY, Tile(64, 32, 4, 2))),
        "attention dkv": ((320, Tile(32, 64, 4, 3)), (ANY, Tile(32, 64, 8, 2))),
        "attention dkv, short": ((320, Tile(32, 64, 4, 3)), (ANY, Tile(32, 64, 8, 2))),
        "attention dkv, packed": ((320, Tile(32, 64, 4, 3)), (ANY, Tile(32, 64, 8, 2))),
    }
}


def blocks(op: str, elements: int, arch: int | None = HOPPER) -> Blocks:
    """What an op with that many elements of input takes on a GPU of compute capability `arch` (90, 100)."""
    table = TABLES.get(arch, TABLES[HOPPER])[op]
    return next(found for limit, found in table if elements < limit)
