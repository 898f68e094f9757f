"""A kernel's forward pass in low precision, its rounding bias, and the shift that removes it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.attention import attention
from models.flash import softmax_shift
from tests.models import oracle
from tests.models.quick import quick_jit

BF16 = ml_dtypes.bfloat16
B, T, N, H = 128, 12, 2, 4


@quick_jit
def shifts(row):
    """Shifts of one row: with β = 2, without, and with β = 2 where P̄ is bfloat16."""
    return jnp.stack([softmax_shift(row, 2), softmax_shift(row), softmax_shift(row, 2, "bfloat16")])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([3.0, 3.0, 1.0], 6.0),  # repeated, above 0: β r
        ([-3.0, -3.0, -9.0], 0.0),  # repeated, below 0
        ([3.0, 2.9, 1.0], 3.0),  # not repeated
        ([0.0, 0.0, -1.0], 0.0),
        ([2.0, -np.inf, -np.inf], 2.0),  # the first query sees itself
        ([90.0, 90.0, 0.0], 90.0),  # exp(−90) would leave float32
        ([-90.0, -90.0, -95.0], -90.0),
        ([np.nan, 1.0, 1.0], np.nan),
    ],
)
def test_shift_of_repeated_maxima(row, expected):
    ours = shifts(np.array(row, np.float32))
    np.testing.assert_array_equal(ours, [expected, np.max(row), expected])


def test_nearly_equal_logits_repeat_where_bfloat16_cannot_tell():
    ours = shifts(np.array([3.0, 3.0 - 2**-10, 1.0], np.float32))
    np.testing.assert_array_equal(ours, [3, 3, 6])


def draw():
    """Every row from the second on has its maximum twice, all else far below; values of one sign.

    The first axis of q and k alone makes the logits: those of the keys, twice that for head two.
    """
    rng = np.random.default_rng(0)
    top = rng.uniform(1, 4, (B, 1)) * np.where(np.arange(B) < B // 2, 1, -1)[:, None]
    logits = top - rng.uniform(9, 11, (B, T))
    logits[:, :2] = top
    q, k = np.zeros((B, T, N, H)), np.zeros((B, T, 1, H))
    q[..., 0], k[..., 0, 0] = [H**0.5, 2 * H**0.5], logits
    v = rng.uniform(-4, -2, k.shape).astype(BF16)
    return [np.float32(x) for x in (q, k, v)]


@quick_jit
def outputs(q, k, v):
    run = lambda **options: attention(q, k, v, backend="flash", **options)
    return (
        run(),
        run(beta=4.0),
        run(pv_dtype="bfloat16"),
        run(pv_dtype="bfloat16", beta=4.0),
    )


def kernel(q, k, v, beta):
    """O of one head in bfloat16, step by step."""
    low = lambda x: np.float32(x).astype(BF16).astype(np.float64)
    out = np.zeros(v.shape)
    for i, t in np.ndindex(q.shape[:2]):
        row = k[i, : t + 1] @ q[i, t] / np.sqrt(H)
        shift = row.max()
        if beta is not None and np.sum(low(np.exp(row - shift)) == 1) > 1:
            shift = beta * shift if shift > 0 else 0.0
        p = np.exp(row - shift)
        out[i, t] = low(low(p) @ low(v[i, : t + 1])) / p.sum()
    return out


def test_options_of_the_forward_pass():
    q, k, v = draw()
    exact, shifted, low, low_shifted = (np.float64(x) for x in outputs(q, k, v))
    heads = [[np.float64(x) for x in (q[:, :, n], k[:, :, 0], v[:, :, 0])] for n in range(N)]
    reference = np.stack([oracle.head_attention(*head)[0] for head in heads], 2)
    # In float32 the shift changes nothing.
    np.testing.assert_allclose(exact, reference, rtol=1e-5)
    np.testing.assert_allclose(shifted, reference, rtol=1e-5)
    for ours, beta in ((low, None), (low_shifted, 4.0)):
        theirs = np.stack([kernel(*head, beta) for head in heads], 2)
        # A sum next to a rounding edge may fall on its other side.
        assert np.mean(np.isclose(ours, theirs, rtol=1e-5)) > 0.99
        np.testing.assert_allclose(ours, theirs, rtol=2**-7)
    # −2.4 + −2.3 lies midway between two bfloat16, and the small rest decides: always outwards.
    bias = lambda o: np.mean((o / reference - 1)[:, 2:])
    assert bias(low) > 5e-4
    assert abs(bias(low_shifted)) < 1e-4


def test_gradients_do_not_feel_the_shift():
    rng = np.random.default_rng(1)
    q, k, v, do = (rng.uniform(0, 1, (2, T, N, H)).astype(np.float32) for _ in range(4))
    k[:, :2] = 2  # the largest logit of every query, twice

    def grads(beta):
        run = lambda *qkv: jnp.sum(do * attention(*qkv, backend="flash", beta=beta))
        return jax.grad(run, (0, 1, 2))(q, k, v)

    plains, shifteds = quick_jit(lambda: (grads(None), grads(4.0)))()
    for plain, shifted in zip(plains, shifteds, strict=True):
        assert np.linalg.norm(shifted - plain) < 1e-5 * np.linalg.norm(plain)


@pytest.mark.parametrize("options", [{"pv_dtype": "bfloat16"}, {"beta": 2.0}])
def test_options_with_the_plain_backend(options):
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"backend='plain' has no choice of pv_dtype=.*beta="):
        attention(q, k, v, backend="plain", **options)
