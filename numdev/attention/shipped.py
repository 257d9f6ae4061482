"""The precision policies of quantised kernels that ship, each with its source. What is not published is said.

The recurrence and the tile that go with each are `softmax` and `tiling` options of the same name in `configs/`.
"""

from __future__ import annotations

from collections.abc import Callable

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, E2M1, E4M3FN, FP16, INT4, INT8
from numdev.arithmetic.microscale import BlockScale, Microscaled
from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.policy import saturating
from numdev.attention.precision import Precision


def fa4_fp8() -> Precision:
    """FlashAttention-4 with E4M3: q, k and v with a scale each, P in E4M3, BF16 output (`flash_attn/cute`, FP8 forward).

    The scales are the caller's, one for each batch entry and head; here there is one for each tensor.
    """
    low = saturating(E4M3FN)
    return Precision.kernel(BF16).with_step(inputs=Quantised(low, scale=Scale.TENSOR), probabilities=low)


def sage1() -> Precision:
    """SageAttention's Triton kernel: blocks of 128 q and 64 k in INT8, P V accumulated in FP16 (arXiv 2410.02367).

    As `attn_qk_int8_per_block.py` and `quant_per_block.py` of its code: the mean of k taken out, codes rounded half away
    from zero, P and V in FP16. How a tensor core adds in FP16 is not published; here its sum is rounded after every 16
    products, the depth of one instruction.
    """
    grid = Cast(INT8, Rounding.NEAREST_AWAY)
    inputs = Quantised(grid, Scale.BLOCK, 64, 128, smoothing=Smoothing.K, values=Cast(FP16))
    return Precision.kernel(FP16).with_step(inputs=inputs, values=Dot(Cast(FP16), 16))


def sage2() -> Precision:
    """SageAttention2 as it ships for Hopper: INT8 q and k by thread, E4M3 V by channel and P (arXiv 2411.10958).

    As `sageattn_qk_int8_pv_fp8_cuda_sm90` of its code: the mean of k taken out, groups within 16 rows of q and 128 of k,
    codes rounded half away from zero, tiles added in FP32. What the FP8 product loses within a tile is not published; it can
    be stated, as in `values=e8m13:toward_zero@32`.
    """
    grid, low = Cast(INT8, Rounding.NEAREST_AWAY), saturating(E4M3FN)
    inputs = Quantised(grid, Scale.THREAD, 128, 16, smoothing=Smoothing.K, values=low, values_scale=Scale.CHANNEL)
    return Precision.kernel(BF16).with_step(inputs=inputs, probabilities=low)


def sage2_int4() -> Precision:
    """SageAttention2's 4-bit variant: INT4 q and k by thread, also q's mean of each 128 tokens taken out (arXiv 2411.10958).

    Groups lie within 32 rows of q and 64 of k. The kernel is described in the paper and is not part of the released code.
    """
    grid, low = Cast(INT4, Rounding.NEAREST_AWAY), saturating(E4M3FN)
    inputs = Quantised(
        grid, Scale.THREAD, 64, 32, smoothing=Smoothing.QK, smoothing_block=128, values=low, values_scale=Scale.CHANNEL
    )
    return Precision.kernel(BF16).with_step(inputs=inputs, probabilities=low)


def sage3() -> Precision:
    """SageAttention3: q, k, v and P in FP4 with an E4M3 scale for each 16 (arXiv 2505.11594).

    Means of k, and of each 128 tokens of q, are taken out. As `sageattention3_blackwell` of its code, whose scales have no
    second level for the tensor. That of P is `p_scale = 448 * 6`, relative to the row's maximum. The kernel divides P by the
    block's scale before that is rounded.
    """
    fp4 = Microscaled(Cast(E2M1), 16, BlockScale.E4M3)
    inputs = Quantised(fp4, smoothing=Smoothing.QK, smoothing_block=128)
    return Precision.kernel(BF16).with_step(inputs=inputs, probabilities=fp4)


SHIPPED: dict[str, Callable[[], Precision]] = {
    "fp8": Precision.fp8,
    "fa3_fp8": Precision.fp8,
    "fa4_fp8": fa4_fp8,
    "int8": Precision.int8,
    "sage1": sage1,
    "sage2": sage2,
    "sage2_int4": sage2_int4,
    "sage3": sage3,
}
"""By name; `fa3_fp8` is another name of `fp8`."""
