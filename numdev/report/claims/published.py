"""Figures of the papers that ours stand beside."""

from __future__ import annotations

FIG4_RATIO = 10.0
"""Golden et al. 2024, section IV.A, Figure 4: FlashAttention over the baseline at BF16, max difference from golden."""

FA3_RATIO = 1.0 / 1.7
"""Shah et al. 2024 (FlashAttention-3), section 4.3: FP16 RMSE of FlashAttention-2 and -3 over the baseline's."""

FA3_RMSE = {
    "fp16_baseline": 3.2e-4,
    "fp16_fa2": 1.9e-4,
    "fp16_fa3": 1.9e-4,
    "fp8_baseline": 2.4e-2,
    "fp8_fa3": 9.1e-3,
    "fp8_fa3_no_block": 9.3e-3,
    "fp8_fa3_no_rotation": 2.4e-2,
}
"""Shah et al. 2024, Table 3: RMSE against FP64, by method."""

FA3_NAMES = {
    "fp16_baseline": "FP16 baseline",
    "fp16_fa2": "FP16 FlashAttention-2",
    "fp16_fa3": "FP16 FlashAttention-3",
    "fp8_baseline": "FP8 baseline",
    "fp8_fa3": "FP8 FlashAttention-3",
    "fp8_fa3_no_block": "FP8 FA3, no block quantisation",
    "fp8_fa3_no_rotation": "FP8 FA3, no incoherent processing",
}
