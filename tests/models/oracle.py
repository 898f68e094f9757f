"""The model once more, in plain float64 NumPy with loops over heads: what the tests compare with.

Knows the parameter tree and the formulas; shares no code with `models`.
"""

import numpy as np


def norm(x, scale, kind):
    x = np.asarray(x, np.float64)
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def rope(x):
    """Multiplies each complex number x_i + i x_{i+H/2} of a (B, T, H) head by its phase."""
    _, t, h = x.shape
    phase = np.arange(t)[:, None] * 10_000.0 ** (-2 * np.arange(h // 2) / h)
    z = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * np.exp(1j * phase)
    return np.concatenate([z.real, z.imag], -1)


def head_attention(q, k, v):
    """One head, each (B, T, H): output, probabilities, entropy averaged and largest logit."""
    b, t, h = q.shape
    out, probabilities = np.zeros_like(q), np.zeros((b, t, t))
    entropies, logits = [], []
    for i in range(b):
        for j in range(t):
            row = k[i, : j + 1] @ q[i, j] / np.sqrt(h)
            p = np.exp(row - row.max())
            p /= p.sum()
            out[i, j] = p @ v[i, : j + 1]
            probabilities[i, j, : j + 1] = p
            entropies.append(-np.sum(p * np.log(p)))
            logits.append(row.max())
    return out, probabilities, np.mean(entropies), max(logits)


def gpt(config, params, tokens):
    """Logits and intermediates of the whole model."""
    params = as_float64(params)
    x = params["embed"]["embedding"][tokens]
    if config.positions == "learned":
        x = x + params["positions"]["embedding"][: tokens.shape[1]]
    captured = []
    for layer in range(config.layers):
        x, seen = block(config, take(params["layers"], layer), x)
        captured.append(seen)
    x = norm(x, params["norm"]["scale"], config.norm)
    head = params["embed"]["embedding"].T if config.tied else params["head"]["kernel"]
    return x @ head, {key: np.stack([seen[key] for seen in captured]) for key in captured[0]}


def block(config, params, x):
    """One block: the stream after it, and its intermediates."""
    attn, mlp = params["attn"], params["mlp"]
    y = norm(x, params["attn_norm"]["scale"], config.norm)
    q, k, v = (np.einsum("btd,dnh->btnh", y, attn[name]["kernel"]) for name in "qkv")
    group = config.heads // k.shape[2]
    entropy, max_logit, update = [], [], 0
    for n in range(config.heads):
        q_n, k_n, v_n = q[:, :, n], k[:, :, n // group], v[:, :, n // group]
        if config.qk_norm:
            q_n = norm(q_n, attn["q_norm"]["scale"], "rmsnorm")
            k_n = norm(k_n, attn["k_norm"]["scale"], "rmsnorm")
        if config.positions == "rope":
            q_n, k_n = rope(q_n), rope(k_n)
        out, _, entropy_n, max_n = head_attention(q_n, k_n, v_n)
        update = update + out @ attn["o"]["kernel"][n]
        entropy.append(entropy_n)
        max_logit.append(max_n)
    x = x + update
    y = norm(x, params["mlp_norm"]["scale"], config.norm)
    up = y @ mlp["up"]["kernel"]
    hidden = silu(y @ mlp["gate"]["kernel"]) * up if config.activation == "swiglu" else gelu(up)
    x = x + hidden @ mlp["down"]["kernel"]
    return x, {
        "attention_entropy": np.array(entropy),
        "max_attention_logit": np.array(max_logit),
        "residual": x,
        "query": q,
        "value": v,
    }


def as_float64(tree):
    if isinstance(tree, dict):
        return {key: as_float64(value) for key, value in tree.items()}
    return np.asarray(tree, np.float64)


def take(tree, index):
    if isinstance(tree, dict):
        return {key: take(value, index) for key, value in tree.items()}
    return tree[index]
