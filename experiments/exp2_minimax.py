"""Derive the minimax polynomials of 2^f on [0, 1) that `numdev.attention.softmax` holds, by the Remez exchange in 60 digits.

Prints, for each degree, the coefficients rounded to FP64 and the largest relative error of the rounded polynomial.
Run: `python experiments/exp2_minimax.py`
"""

from __future__ import annotations

from mpmath import lu_solve, matrix, mp, mpf

mp.dps = 60
_GRID = 4000


def relative_error(coefficients: list[mpf], f: mpf) -> mpf:
    """(p(f) - 2^f) / 2^f."""
    value = mpf(0)
    for c in reversed(coefficients):
        value = value * f + c
    return value / mpf(2) ** f - 1


def minimax(degree: int, rounds: int = 12) -> list[mpf]:
    """The polynomial whose relative error alternates `degree + 2` times with equal size (Chebyshev's theorem)."""
    count = degree + 2
    points = [(1 - mp.cos(mp.pi * i / (count - 1))) / 2 for i in range(count)]
    for _ in range(rounds):
        system, right = matrix(count, count), matrix(count, 1)
        for row, f in enumerate(points):
            for power in range(degree + 1):
                system[row, power] = f**power / mpf(2) ** f
            system[row, degree + 1] = (-1) ** row
            right[row] = 1
        solution = lu_solve(system, right)
        coefficients = [solution[i] for i in range(degree + 1)]
        points = extrema(coefficients, count)
    return coefficients


def extrema(coefficients: list[mpf], count: int) -> list[mpf]:
    """The largest error within each run of one sign on a fine grid, refined by a parabola."""
    grid = [mpf(i) / _GRID for i in range(_GRID + 1)]
    errors = [relative_error(coefficients, f) for f in grid]
    runs: list[list[int]] = [[0]]
    for i in range(1, len(grid)):
        if (errors[i] > 0) == (errors[i - 1] > 0):
            runs[-1].append(i)
        else:
            runs.append([i])
    best = [max(run, key=lambda i: abs(errors[i])) for run in runs]
    if len(best) != count:
        raise RuntimeError(f"{len(best)} alternations instead of {count}")
    refined = []
    for i in best:
        if 0 < i < _GRID:
            left, middle, right = errors[i - 1], errors[i], errors[i + 1]
            refined.append(grid[i] + (left - right) / (2 * (left - 2 * middle + right)) / _GRID)
        else:
            refined.append(grid[i])
    return refined


if __name__ == "__main__":
    for degree in range(1, 6):
        rounded = [float(c) for c in minimax(degree)]
        worst = max(abs(relative_error([mpf(c) for c in rounded], mpf(i) / 10_000)) for i in range(10_001))
        print(degree, rounded, f"{float(worst):.4e}")
