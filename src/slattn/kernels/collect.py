"""The small device programs after the Hopper backward's: dkv out of its table, or summed from its partial rows."""

from typing import Any

import tilelang.language as T

from slattn.kernels.config import FinishConfig, FoldConfig
from slattn.kernels.device import FP32, INT32
from slattn.kernels.hopper_cuda import HOPPER_PRELUDE


def column_in_table(column: Any) -> Any:
    """Where the Hopper backward's table keeps a column of 32: beside it stand the others of the 4 that a lane adds at
    once (`add_rows` in `slattn.kernels.hopper_cuda`).
    """
    return column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2


def finish(config: FinishConfig) -> Any:
    """The program that takes dkv out of the Hopper backward's table.

    Parameters of the program, all contiguous: Table [N * D / 32, 32] fp32; DKV, the same in the configuration's dtype
    (written); add, whether DKV is added to instead.
    """
    pieces = T.dynamic("pieces")

    @T.prim_func
    def main(Table: T.Tensor((pieces, 32), FP32), DKV: T.Tensor((pieces, 32), config.dtype), add: T.int32):
        with T.Kernel(T.ceildiv(pieces, config.threads), threads=config.threads) as bx:
            value = T.alloc_fragment((config.threads, 32), FP32)
            for i, j in T.Parallel(config.threads, 32):
                if bx * config.threads + i < pieces:
                    value[i, j] = Table[bx * config.threads + i, column_in_table(j)]
                    if add != 0:
                        value[i, j] += DKV[bx * config.threads + i, j]
                    DKV[bx * config.threads + i, j] = value[i, j]

    return main


def fold(config: FoldConfig) -> Any:
    """The program that adds up the Hopper backward's partial rows.

    Parameters of the program, all contiguous: Partials [X, D] fp16 and Exponents [X, D / 64] uint8, as the backward
    wrote them; Order [P], the first group's row of each slot, sorted by the key that it names; Starts [N + 1], where
    each key's begin; DKV [N, D] fp32 (added to); groups of heads, and room, the rows between two of them.
    """
    dim = config.head_dim
    partials, pairs, keys, starts = T.dynamic("partials, pairs, keys, starts")

    @T.prim_func
    def main(
        Partials: T.Tensor((partials, dim), "float16"),
        Exponents: T.Tensor((partials, dim // 64), "uint8"),
        Order: T.Tensor((pairs,), INT32),
        Starts: T.Tensor((starts,), INT32),
        DKV: T.Tensor((keys, dim), FP32),
        groups: T.int32,
        room: T.int32,
    ):
        with T.Kernel(keys, threads=config.threads, prelude=HOPPER_PRELUDE) as bx:
            T.call_extern(
                "handle",
                f"slattn::fold_rows<{dim}>",
                T.access_ptr(Partials, "r"),
                T.access_ptr(Exponents, "r"),
                T.access_ptr(Order, "r"),
                Starts[bx],
                Starts[bx + 1],
                groups,
                room,
                T.access_ptr(DKV[bx, 0], "rw"),
            )

    return main
