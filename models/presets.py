"""Named shapes: the models of the papers behind this library, and the small ones of experiments.

Here: `PRESETS`. Not here: how they are trained (learning rates, tokens a step), which is each
experiment's.
"""

from dataclasses import replace

from models.config import GPTConfig

LLAMA_1B = GPTConfig(
    vocabulary=32_000,
    layers=16,
    model=2048,
    heads=16,
    feedforward=5440,
    context=2048,
    positions="rope",
    activation="swiglu",
    tied=False,
)
SIGMA_40M = replace(LLAMA_1B, layers=28, model=128, heads=4, feedforward=448)
PRESETS: dict[str, GPTConfig] = {
    # arXiv 2602.01734; 5M parameters only with both embeddings. μP: std 0.02 · 4, W_Q = 0.
    "nanogpt-5m": GPTConfig(
        vocabulary=50_257,
        layers=24,
        model=48,
        heads=6,
        context=256,
        norm="layernorm",
        positions="none",
        tied=False,
        std=0.08,
        embedding_std=0.02,
        zero_query=True,
    ),
    # There MHA and MLA alternate; here a model is of one kind, so there are two.
    "sigma-40m-mha": SIGMA_40M,
    "sigma-40m-mla": replace(SIGMA_40M, attention="mla"),
    "llama-1b": LLAMA_1B,
    "llama-moe-3b": replace(LLAMA_1B, feedforward=1360, experts=16, top_k=4),
    # The mini model of a re-implementation of arXiv 2606.28116.
    "qwen3-moe-mini": replace(
        LLAMA_1B,
        layers=8,
        model=512,
        heads=8,
        kv_heads=2,
        feedforward=384,
        qk_norm=True,
        experts=64,
        top_k=4,
        auxiliary_weight=1e-3,
    ),
}
