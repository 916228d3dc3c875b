"""The small device program after the backward: dkv out of its table."""

from typing import Any

import tilelang.language as T

from slattn.kernels.config import FinishConfig
from slattn.kernels.device import FP32, INT32
from slattn.kernels.exact_cuda import EXACT_PRELUDE


def column_in_table(column: Any) -> Any:
    """Where the Hopper backward's table keeps a column of 32: beside it stand the others of the 4 that a lane adds at
    once (`add_rows` in `slattn.kernels.hopper_cuda`).
    """
    return column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2


def word_of(column: Any) -> Any:
    """Which of the 16 integers for 32 columns a column is in, in deterministic mode (`add_units` in exact_cuda)."""
    return column // 8 % 2 * 8 + column // 16 * 4 + column % 8 // 2


def finish(config: FinishConfig) -> Any:
    """The program that takes dkv out of the Hopper backward's table, or in deterministic mode of either backward's.

    Parameters of the program, all contiguous: Table [N * D / 32, 32] fp32, or [N * D / 32, 16] int64 if deterministic;
    DKV [N * D / 32, 32] in the configuration's dtype (written); add, whether DKV is added to instead; and, read only
    if deterministic, Whole [N * D / 32, 32] int64, Scales and Parts [N] and pieces, D / 32.
    """
    exact, threads = config.deterministic, config.threads
    pieces, wholes, rows = T.dynamic("pieces, wholes, rows")

    @T.prim_func
    def main(
        Table: T.Tensor((pieces, 16) if exact else (pieces, 32), "int64" if exact else FP32),
        DKV: T.Tensor((pieces, 32), config.dtype),
        add: T.int32,
        Whole: T.Tensor((wholes, 32), "int64"),
        Scales: T.Tensor((rows,), FP32),
        Parts: T.Tensor((rows,), INT32),
        pieces_of_a_row: T.int32,
    ):
        with T.Kernel(T.ceildiv(pieces, threads), threads=threads, prelude=EXACT_PRELUDE) as bx:
            value = T.alloc_fragment((threads, 32), FP32)
            for i, j in T.Parallel(threads, 32):
                if bx * threads + i < pieces:
                    if exact:
                        value[i, j] = T.call_extern(
                            FP32,
                            "slattn::sum_of",
                            Table[bx * threads + i, word_of(j)],
                            Parts[(bx * threads + i) // pieces_of_a_row],
                            j % 2 != 0,
                            Scales[(bx * threads + i) // pieces_of_a_row],
                            Whole[bx * threads + i, j],
                        )
                    else:
                        value[i, j] = Table[bx * threads + i, column_in_table(j)]
                    if add != 0:
                        value[i, j] += DKV[bx * threads + i, j]
                    DKV[bx * threads + i, j] = value[i, j]

    return main
