"""Scalar functions that approximate the sign on [1/κ, 1]: odd polynomials and Halley rationals.

Float64 NumPy, computed once at trace time and cached. The matrix iterations that use the
coefficients live in `polar.py`.
"""

import functools
import math

import numpy as np

# Rounding may push a singular value past the end of an interval, where the polynomials are steep.
MARGIN = 1e-4
TOLERANCE = 2e-5

Polynomial = tuple[float, ...]
Rational = tuple[float, float, float]


def minimax_odd(lower: float, upper: float, degree: int) -> tuple[Polynomial, float]:
    """The odd polynomial closest to 1 on [lower, upper], by Remez exchange.

    It minimises E = max |1 − p(x)|, p(x) = c₀x + c₁x³ + … of the given degree, and 1 − p takes
    the values ±E with alternating sign at (degree + 3)/2 points.

    Args:
        lower: Left end, > 0.
        upper: Right end, > lower.
        degree: Odd, ≥ 1.

    Returns:
        The coefficients (c₀, c₁, …) and E in [0, 1).

    >>> coefficients, error = minimax_odd(0.5, 1.0, 3)
    >>> [round(c, 4) for c in coefficients], round(error, 4)
    ([2.1328, -1.2187], 0.086)

    References:
        Polar Express, arXiv 2505.16932, section 3: composing these greedily is optimal.
    """
    terms = (degree + 1) // 2
    powers = 2 * np.arange(terms) + 1
    nodes = np.cos(np.pi * np.arange(terms, -1, -1) / terms)
    nodes = (lower + upper + (upper - lower) * nodes) / (2 * upper)
    coefficients, error = np.zeros(terms), 1.0
    for _ in range(50):
        system = np.c_[nodes[:, None] ** powers, (-1.0) ** np.arange(terms + 1)]
        solution = np.linalg.solve(system, np.ones(terms + 1))
        coefficients, error = solution[:-1], float(abs(solution[-1]))
        squares = np.roots((coefficients * powers)[::-1]).real
        extrema = np.sqrt(np.clip(np.sort(squares), (lower / upper) ** 2, 1.0))
        moved = np.r_[lower / upper, extrema, 1.0]
        if np.max(np.abs(moved - nodes)) < 1e-12:
            break
        nodes = moved
    return tuple((coefficients / upper**powers).tolist()), error


@functools.lru_cache(maxsize=256)
def composite(lower: float, count: int) -> tuple[tuple[Polynomial, ...], float]:
    """Greedy composition p_k(…p₁(x)) ≈ 1 on [lower, 1] of quintics, and its largest error.

    Each polynomial is the best on the interval that the earlier ones leave, widened by `MARGIN`
    at both ends. Higher degrees alternate in the hundreds there and cost float32 digits.

    Args:
        lower: Left end of the first interval, in (0, 1).
        count: Number of polynomials.
    """
    low, high, polynomials = lower, 1.0, []
    for _ in range(count):
        polynomial, error = minimax_odd(low * (1 - MARGIN), high * (1 + MARGIN), 5)
        polynomials.append(polynomial)
        low, high = 1 - error, 1 + error
    return tuple(polynomials), high - 1


@functools.lru_cache(maxsize=256)
def quintic_schedule(lower: float, multiple: int = 1) -> tuple[Polynomial, ...]:
    """The shortest composition that reaches `TOLERANCE` on [lower, 1], of a multiple of quintics.

    >>> len(quintic_schedule(6e-5)), len(quintic_schedule(6e-5, multiple=2))
    (9, 10)
    """
    for count in range(multiple, 24, multiple):
        polynomials, error = composite(lower, count)
        if error <= TOLERANCE:
            return polynomials
    raise ValueError(f"no schedule reaches 1 from {lower}; write a smaller condition number")


@functools.lru_cache(maxsize=256)
def halley_schedule(
    lower: float, lifts: int = 3
) -> tuple[tuple[Polynomial, ...], tuple[Rational, ...]]:
    """Quintic lifts, then dynamically weighted Halley steps to within `TOLERANCE` of 1.

    A step is x ↦ x (a + b x²)/(1 + c x²). Without lifts the first c grows like lower^(−4/3), and
    I + c XᵀX is too ill-conditioned for a Cholesky factor in float32: at a condition number of
    1e4 the result is off by 3e-3·√n, after three lifts by no more than an SVD.

    Args:
        lower: Left end of the interval, in (0, 1).
        lifts: Number of quintic steps before.

    Returns:
        Polynomial coefficients, and the weights (a, b, c) of each step.

    References:
        Nakatsukasa, Bai, Gygi: Optimizing Halley's iteration for computing the matrix polar
        decomposition, SIAM J. Matrix Anal. Appl. 31 (2010), eq. 3.18 and 3.19.
    """
    polynomials, error = composite(lower, lifts)
    # The Halley weights assume [low, 1]: fold the division by the upper end into the last lift.
    upper = (1 + error) * (1 + MARGIN) if lifts else 1.0
    if lifts:
        polynomials = (*polynomials[:-1], tuple(c / upper for c in polynomials[-1]))
    low = max(1 - error, 1e-12) / upper if lifts else lower
    steps = []
    while 1 - low > TOLERANCE / 4:
        square = low * low
        root = math.sqrt(1 + (4 * (1 - square) / square**2) ** (1 / 3))
        a = root + 0.5 * math.sqrt(8 - 4 * (root**2 - 1) + 8 * (2 - square) / (square * root))
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        steps.append((a, b, c))
        low = low * (a + b * square) / (1 + c * square)
    return polynomials, tuple(steps)
