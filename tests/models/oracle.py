"""The model once more, in plain float64 NumPy with loops over heads: what the tests compare with.

Knows the parameter tree and the formulas; shares no code with `models`.
"""

import ml_dtypes
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
    out, probabilities = np.zeros((b, t, v.shape[-1])), np.zeros((b, t, t))
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


def rows_with_repeated_maximum(q, k):
    """Causal rows of one head whose largest logit, rounded to bfloat16, is there twice."""
    rows = [
        (k[i, : j + 1] @ q[i, j] / np.sqrt(q.shape[2])).astype(ml_dtypes.bfloat16)
        for i in range(q.shape[0])
        for j in range(q.shape[1])
    ]
    return sum(float(np.sum(row == row.max()) > 1) for row in rows)


def gpt(config, params, tokens):
    """Logits, router losses and intermediates of the whole model."""
    params = as_float64(params)
    x = params["embed"]["embedding"][tokens]
    if config.positions == "learned":
        x = x + params["positions"]["embedding"][: tokens.shape[1]]
    lost, captured = [], []
    for layer in range(config.layers):
        x, losses, seen = block(config, take(params["layers"], layer), x)
        lost.append(losses)
        captured.append(seen)
    x = norm(x, params["norm"]["scale"], config.norm)
    head = params["embed"]["embedding"].T if config.tied else params["head"]["kernel"]
    stack = lambda dicts: {key: np.stack([d[key] for d in dicts]) for key in dicts[0]}
    return x @ head, stack(lost), stack(captured)


def block(config, params, x):
    """One block: the stream after it, its router losses and its intermediates."""
    attend = latent_attention if config.attention == "mla" else attention
    y = norm(x, params["attn_norm"]["scale"], config.norm)
    update, seen = attend(config, params["attn"], y)
    x = x + update
    y = norm(x, params["mlp_norm"]["scale"], config.norm)
    if config.experts:
        update, losses, routing = moe(config, params["moe"], y)
    else:
        update, losses, routing = mlp(config, params["mlp"], y), {"balance": 0.0, "z": 0.0}, {}
    x = x + update
    return x, losses, {**seen, **routing, "residual": x}


def attention(config, params, y):
    """Multi-head or grouped-query attention: what it adds to the stream, and its intermediates."""
    q, k, v = (np.einsum("btd,dnh->btnh", y, params[name]["kernel"]) for name in "qkv")
    group = config.heads // k.shape[2]
    heads = []
    for n in range(config.heads):
        q_n, k_n, v_n = q[:, :, n], k[:, :, n // group], v[:, :, n // group]
        if config.qk_norm:
            q_n = norm(q_n, params["q_norm"]["scale"], "rmsnorm")
            k_n = norm(k_n, params["k_norm"]["scale"], "rmsnorm")
        if config.positions == "rope":
            q_n, k_n = rope(q_n), rope(k_n)
        heads.append((q_n, k_n, v_n))
    return attended(heads, params["o"]["kernel"], q, v)


def latent_attention(config, params, y):
    """Attention through latents, the projections of each head composed into one matrix."""
    kernel = lambda name: params[name]["kernel"]
    rms = lambda c: np.sqrt((c**2).mean(-1, keepdims=True) + 1e-6)
    rms_q, rms_kv = rms(y @ kernel("q_down")), rms(y @ kernel("kv_down"))
    down_q = kernel("q_down") @ np.diag(params["q_norm"]["scale"])
    down_kv = kernel("kv_down") @ np.diag(params["kv_norm"]["scale"])
    heads = []
    for n in range(config.heads):
        q_n = y @ (down_q @ kernel("q_up")[:, n]) / rms_q
        k_n = y @ (down_kv @ kernel("k_up")[:, n]) / rms_kv
        v_n = y @ (down_kv @ kernel("v_up")[:, n]) / rms_kv
        heads.append((q_n, k_n, v_n))
    q, v = np.stack([q for q, _, _ in heads], 2), np.stack([v for _, _, v in heads], 2)
    if config.positions == "rope":
        shared = rope(y @ kernel("k_rope"))
        for n, (q_n, k_n, v_n) in enumerate(heads):
            turned = rope(y @ (down_q @ kernel("q_rope")[:, n]) / rms_q)
            heads[n] = np.concatenate([q_n, turned], -1), np.concatenate([k_n, shared], -1), v_n
    return attended(heads, kernel("o"), q, v)


def attended(heads, o, q, v):
    """The sum of all heads' outputs, and the intermediates."""
    update, entropy, max_logit, sink, repeated = 0, [], [], [], []
    for n, (q_n, k_n, v_n) in enumerate(heads):
        out, p, entropy_n, max_n = head_attention(q_n, k_n, v_n)
        update = update + out @ o[n]
        entropy.append(entropy_n)
        max_logit.append(max_n)
        sink.append(p[..., 0].mean())
        repeated.append(rows_with_repeated_maximum(q_n, k_n))
    return update, {
        "attention_entropy": np.array(entropy),
        "max_attention_logit": np.array(max_logit),
        "sink_mass": np.array(sink),
        "repeated_maximum": np.array(repeated),
        "query": q,
        "value": v,
    }


def mlp(config, params, y):
    up = y @ params["up"]["kernel"]
    if config.activation == "swiglu":
        return silu(y @ params["gate"]["kernel"]) * up @ params["down"]["kernel"]
    return gelu(up) @ params["down"]["kernel"]


def moe(config, params, y):
    """The mixture token by token: its output, its losses, its intermediates."""
    b, t, _ = y.shape
    e, k = config.experts, config.top_k
    logits = y @ params["router"]["kernel"]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    factor = config.capacity_factor
    capacity = t if factor is None else min(t, np.ceil(factor * k * t / e))
    experts = [
        {
            name: {"kernel": params[name]["kernel"][i]}
            for name in params.keys() - {"router", "shared"}
        }
        for i in range(e)
    ]
    out, load, dropped = np.zeros_like(y), np.zeros(e), 0
    for i in range(b):
        taken = np.zeros(e)
        for j in range(t):
            chosen = sorted(range(e), key=lambda n: -p[i, j, n])[:k]
            total = p[i, j, chosen].sum() if config.norm_top_k else 1.0
            for n in chosen:
                if taken[n] < capacity:
                    out[i, j] += p[i, j, n] / total * mlp(config, experts[n], y[i, j])
                else:
                    dropped += 1
                taken[n] += 1
        load += taken
    load /= load.sum()
    if config.shared_experts:
        out = out + mlp(config, params["shared"], y)
    z = np.log(np.exp(logits).sum(-1))
    losses = {"balance": e * np.sum(load * p.mean((0, 1))), "z": np.mean(z**2)}
    routing = {"router_logits": logits, "expert_load": load, "dropped": dropped / (b * t * k)}
    return out, losses, routing


def as_float64(tree):
    if isinstance(tree, dict):
        return {key: as_float64(value) for key, value in tree.items()}
    return np.asarray(tree, np.float64)


def take(tree, index):
    if isinstance(tree, dict):
        return {key: take(value, index) for key, value in tree.items()}
    return tree[index]
