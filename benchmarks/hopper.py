"""Launch settings of the Hopper kernel side by side: rows of a tile, buffers, registers.

    python -m benchmarks.hopper [--quick]

Shapes, rounds and figure as in `benchmarks/kernels.py`; the first column is the pinned launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks.kernels import TOKENS, WIDTH, seconds
from numdev.attention.kernels.hopper.launch import SHAPES, Shape, pinned_br
from numdev.attention.mask import Mask
from numdev.attention.triton import Kernel, Triton

VARIANTS = {
    64: [Shape(2, 2, 240), Shape(2, 4, 240), Shape(3, 2, 160), Shape(3, 3, 160), Shape(3, 4, 160)],
    128: [Shape(2, 2, 232), Shape(2, 2, 240)],
}


def contender(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> Callable[[], object]:
    """A call in a shape; its plan is its own, since a plan that is kept for settings says nothing of the shape."""
    kept = SHAPES.get((q.shape[-1], shape.br))
    SHAPES[q.shape[-1], shape.br] = shape
    try:
        plan = Triton(br=shape.br, kernel=Kernel.HOPPER)._prepare(q, k, v, mask, None)
    finally:
        if kept is not None:
            SHAPES[q.shape[-1], shape.br] = kept
    return lambda: plan.run(q, k, v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="N = 1024 and 4096 only")
    lengths = (1024, 4096) if parser.parse_args().quick else (1024, 2048, 4096, 8192, 16384)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "TFLOP/s")
    for dim, variants in VARIANTS.items():
        for causal in (False, True):
            mask = Mask(causal=causal)
            for n in lengths:
                q, k, v = (torch.randn(TOKENS // n, WIDTH // dim, n, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                pinned = SHAPES[dim, pinned_br(dim, mask, n, n)]
                times = seconds({str(shape): contender(shape, q, k, v, mask) for shape in dict.fromkeys([pinned, *variants])})
                flops = 4 * TOKENS * WIDTH * n * (0.5 if causal else 1.0)
                rates = "  ".join(f"{name.removeprefix('Shape')} {flops / value / 1e12:4.0f}" for name, value in times.items())
                print(f"d {dim:3d} {'causal' if causal else 'none  '} N {n:5d}  {rates}", flush=True)


if __name__ == "__main__":
    main()
