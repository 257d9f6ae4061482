"""The papers whose claims are judged, and published figures that ours are compared with."""

from __future__ import annotations

GOLDEN = "Golden et al. 2024"
FA3 = "Shah et al. 2024 (FlashAttention-3)"

FIG4_RATIO = 10.0
"""Golden et al. 2024, section IV.A, Figure 4: FlashAttention over the baseline at BF16, max difference from golden."""

FA3_RATIO = 1.0 / 1.7
"""Shah et al. 2024 (FlashAttention-3), section 4.3: FP16 RMSE of FlashAttention-2 and -3 over the baseline's."""

FA3_RMSE = {
    "FP16 baseline": 3.2e-4,
    "FP16 FlashAttention-2": 1.9e-4,
    "FP16 FlashAttention-3": 1.9e-4,
    "FP8 baseline": 2.4e-2,
    "FP8 FlashAttention-3": 9.1e-3,
    "FP8 FA3, no block quantisation": 9.3e-3,
    "FP8 FA3, no incoherent processing": 2.4e-2,
}
"""Shah et al. 2024, Table 3: RMSE against FP64. A study's scenarios state which row they stand for."""
