"""Both attention backends against each other and a float64 oracle; the altered backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import entr, softmax

from models.attention import attention, attention_statistics, flash_attention
from tests.models import oracle
from tests.models.quick import quick_jit

B, T, N, K, H = 2, 9, 4, 2, 8


def draw(seed=0, n=N, k=K, t=T, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = [(B, t, n, H), (B, t, k, H), (B, t, k, H), (B, t, n, H)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def halve(o, do, gate):
    """A backward hook: half of O where the gate is open."""
    return jnp.where(gate > 0, o / 2, o), do


@quick_jit
def plain(q, k, v, do):
    out, vjp = jax.vjp(lambda *qkv: attention(*qkv, backend="plain"), q, k, v)
    return out, vjp(do)


@jax.jit
def flash(q, k, v, do):
    out, vjp = jax.vjp(lambda *qkv: attention(*qkv, backend="flash"), q, k, v)
    return out, vjp(do)


@jax.jit
def hooked(q, k, v, do, gate):
    run = lambda *args: attention(*args[:3], backend="flash", backward=halve, gate=args[3])
    out, vjp = jax.vjp(run, q, k, v, gate)
    return out, vjp(do)


statistics = quick_jit(attention_statistics)


def heads(q, k, v):
    """The float64 arrays of each query head and of its key-value head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    return [(q[:, :, n], k[:, :, n // group], v[:, :, n // group]) for n in range(q.shape[2])]


@pytest.mark.parametrize("run", [plain, flash])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_forward(run, size):
    q, k, v, do = draw()
    q = size * q
    out, _ = run(q, k, v, do)
    expected = np.stack([oracle.head_attention(*head)[0] for head in heads(q, k, v)], 2)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_flash_gradients_equal_the_plain_ones():
    args = draw(1)
    for ours, theirs in zip(flash(*args)[1], plain(*args)[1], strict=True):
        assert relative(ours, theirs) < 1e-6


def test_flash_gradients_in_float64():
    q, k, v, do = draw(2)
    _, (dq, dk, dv) = flash(q, k, v, do)
    expected_q, expected_k, expected_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for n, (q_n, k_n, v_n) in enumerate(heads(q, k, v)):
        _, p, *_ = oracle.head_attention(q_n, k_n, v_n)
        do_n = np.asarray(do[:, :, n], np.float64)
        dp = do_n @ v_n.swapaxes(1, 2)
        # δ the other way, rowsum(dP ∘ P): the softmax Jacobian itself.
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(H)
        expected_q[:, :, n] = ds @ k_n
        expected_k[:, :, n // (N // K)] += ds.swapaxes(1, 2) @ q_n
        expected_v[:, :, n // (N // K)] += p.swapaxes(1, 2) @ do_n
    assert relative(dq, expected_q) < 1e-6
    assert relative(dk, expected_k) < 1e-6
    assert relative(dv, expected_v) < 1e-6


@pytest.mark.parametrize("run", [plain, flash])
def test_grouped_queries_equal_repeated_keys_and_values(run):
    q, k, v, do = draw(3)
    out, (dq, dk, dv) = run(q, k, v, do)
    repeat = lambda x: jnp.repeat(x, N // K, axis=2)
    full_out, (full_dq, full_dk, full_dv) = run(q, repeat(k), repeat(v), do)
    fold = lambda x: x.reshape(B, T, K, N // K, H).sum(3)
    np.testing.assert_allclose(out, full_out, atol=1e-6)
    np.testing.assert_allclose(dq, full_dq, atol=2e-6)
    np.testing.assert_allclose(dk, fold(full_dk), atol=2e-6)
    np.testing.assert_allclose(dv, fold(full_dv), atol=2e-6)


@pytest.mark.parametrize("run", [plain, flash])
def test_bfloat16_stays_within_its_rounding(run):
    args = draw(4)
    out, grads = run(*(x.astype(jnp.bfloat16) for x in args))
    exact_out, exact_grads = plain(*(x.astype(jnp.bfloat16).astype(jnp.float32) for x in args))
    for low, exact in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        assert low.dtype == jnp.bfloat16
        assert relative(low, exact) < 2**-7


def test_first_position_sees_itself_only():
    q, k, v, do = draw(5, t=1)
    out, (dq, dk, dv) = flash(q, k, v, do)
    np.testing.assert_array_equal(out, jnp.repeat(v, N // K, axis=2))
    np.testing.assert_allclose(dq, jnp.zeros_like(q), atol=1e-6)
    np.testing.assert_allclose(dk, jnp.zeros_like(k), atol=1e-6)
    np.testing.assert_allclose(dv, do.reshape(B, 1, K, N // K, H).sum(3), rtol=1e-6)


def test_closed_gate_is_bit_identical_to_no_hook():
    args = draw(6)
    out, grads = hooked(*args, jnp.float32(0))
    clean_out, clean_grads = flash(*args)
    np.testing.assert_array_equal(out, clean_out)
    for hooked_grad, clean in zip(grads[:3], clean_grads, strict=True):
        np.testing.assert_array_equal(hooked_grad, clean)


def test_open_gate_changes_dq_and_dk_through_delta_only():
    q, k, v, do = draw(7)
    out, (dq, dk, dv, dgate) = hooked(q, k, v, do, jnp.float32(1))
    clean_out, (clean_dq, clean_dk, clean_dv) = flash(q, k, v, do)
    np.testing.assert_array_equal(out, clean_out)
    np.testing.assert_array_equal(dv, clean_dv)
    assert dgate == 0
    error_q, error_k = np.zeros(q.shape), np.zeros(k.shape)
    for n, (q_n, k_n, v_n) in enumerate(heads(q, k, v)):
        o_n, p, *_ = oracle.head_attention(q_n, k_n, v_n)
        lost = -0.5 * (o_n * np.asarray(do[:, :, n])).sum(-1)  # δ altered less δ
        ds = -p * lost[..., None] / np.sqrt(H)
        error_q[:, :, n] = ds @ k_n
        error_k[:, :, n // (N // K)] += ds.swapaxes(1, 2) @ q_n
    assert relative(dq - clean_dq, error_q) < 1e-5
    assert relative(dk - clean_dk, error_k) < 1e-5


def test_gate_defaults_to_open():
    q, k, v, do = draw(8)
    run = lambda q: jnp.sum(do * attention(q, k, v, backend="flash", backward=halve))
    _, (dq, *_) = hooked(q, k, v, do, jnp.float32(1))
    np.testing.assert_allclose(quick_jit(jax.grad(run))(q), dq, rtol=1e-5, atol=1e-6)


def test_vmap_over_a_batch_of_gates():
    q, k, v, do = draw(9)
    run = lambda q, gate: jnp.sum(do * flash_attention(q, k, v, gate, halve))
    dq = quick_jit(jax.vmap(jax.grad(run), (None, 0)))(q, jnp.array([0.0, 1.0]))
    for gate in (0, 1):
        _, (expected, *_) = hooked(q, k, v, do, jnp.float32(gate))
        np.testing.assert_allclose(dq[gate], expected, rtol=1e-5, atol=1e-6)


def test_statistics():
    q, k, v, _ = draw(10)
    got = statistics(3 * q, k)
    entropy, max_logit = got["attention_entropy"], got["max_attention_logit"]
    expected = [oracle.head_attention(*head)[2:] for head in heads(3 * q, k, v)]
    np.testing.assert_allclose(entropy, [e for e, _ in expected], rtol=1e-5)
    np.testing.assert_allclose(max_logit, [m for _, m in expected], rtol=1e-6)


def test_statistics_of_uniform_attention():
    q, k, _, _ = draw(11)
    got = statistics(0 * q, k)
    entropy, max_logit = got["attention_entropy"], got["max_attention_logit"]
    np.testing.assert_allclose(got["sink_mass"], np.full(N, (1 / np.arange(1, T + 1)).mean()), 1e-6)
    np.testing.assert_array_equal(got["repeated_maximum"], np.full(N, B * (T - 1)))
    np.testing.assert_allclose(entropy, np.full(N, np.log(np.arange(1, T + 1)).mean()), rtol=1e-6)
    np.testing.assert_array_equal(max_logit, np.zeros(N))


def test_entropy_of_huge_logits_keeps_its_digits():
    q, k, v, _ = draw(11)
    got = statistics(3e4 * q, k)
    exact = lambda x, y: (
        -sum(entr_row(y[i, : j + 1] @ x[i, j] / np.sqrt(H)) for i in range(B) for j in range(T))
    )
    entr_row = lambda row: -entr(softmax(row)).sum() / (B * T)
    expected = [exact(q_n, k_n) for q_n, k_n, _ in heads(3e4 * q, k, v)]
    assert float(np.max(got["max_attention_logit"])) > 1e4
    np.testing.assert_allclose(got["attention_entropy"], expected, atol=1e-4)
    assert float(np.min(got["attention_entropy"])) >= 0


def test_statistics_of_one_bad_head_are_nan_for_that_head():
    q, k, _, _ = draw(12)
    q = np.array(q)
    q[0, 3, 1, 0] = np.nan
    got = statistics(q, k)
    entropy, max_logit = got["attention_entropy"], got["max_attention_logit"]
    np.testing.assert_array_equal(np.isnan(entropy), [False, True, False, False])
    np.testing.assert_array_equal(np.isnan(max_logit), [False, True, False, False])


def test_statistics_of_bfloat16_are_float32():
    q, k, *_ = draw(13, dtype=jnp.bfloat16)
    shapes = jax.eval_shape(attention_statistics, q, k).values()
    assert {x.dtype for x in shapes} == {jnp.dtype("float32")}


def test_repeated_maxima_are_those_of_bfloat16():
    q = jnp.ones((1, 3, 1, 1))
    keys = jnp.array([1.0, 1.0 + 2**-9, 2.0])  # the second rounds to the first
    got = attention_statistics(q, keys.reshape(1, 3, 1, 1))
    assert got["repeated_maximum"].item() == 1


def test_hook_with_the_plain_backend():
    q, k, v, _ = draw()
    with pytest.raises(ValueError, match=r"backend='plain' cannot .* write backend='flash'"):
        attention(q, k, v, backend="plain", backward=halve)


def test_unknown_backend():
    q, k, v, _ = draw()
    with pytest.raises(ValueError, match="backend='triton' is not offered; write one of 'plain'"):
        attention(q, k, v, backend="triton")


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((B, T, 3, H), (B, T, K, H), (B, T, K, H)),
        ((B, T, N, H), (B, T + 1, K, H), (B, T + 1, K, H)),
        ((B, T, N, H), (B, T, K, H), (B, T, N, H)),
        ((B, T, N, H), (B, T, K, H + 1), (B, T, K, H + 1)),
        ((B, T, N, H), (B, T, K, H), (B, T, K, H + 1)),
        ((T, N, H), (T, K, H), (T, K, H)),
    ],
)
def test_shapes_that_do_not_fit(q, k, v):
    with pytest.raises(ValueError, match=r"do not fit; write queries \(B, T, N, H\)"):
        attention(*(np.zeros(shape, np.float32) for shape in (q, k, v)), backend="flash")
