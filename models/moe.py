"""A mixture of experts in place of the feed-forward layer: router, dispatch, experts, losses.

Here: `MoE`, `route`, the plans that give each choice of a token its row, and the two losses that
keep a router in shape. Not here: the dense layer, which shared experts are too (`layers.py`), what
monitors make of router logits, nor the sum of the losses over a training step's other terms.

Every choice (token, expert) gets a row in a buffer of G groups × C rows; a group belongs to one
expert, so the experts are G equal matrix products, at static shapes, whatever the router does.
"""

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import GPTConfig
from models.layers import MLP, Projection, activate

# Dropless: groups per expert if all are used alike. More waste fewer rows and more copies of W.
_GROUPS = 4


class Plan(NamedTuple):
    """Where each choice lies in the buffer, rows (group, row within it) flattened.

    Attributes:
      row_BTJ: row of each choice; G · C where the choice is dropped.
      owner_G: expert of each group; None where group e is expert e.
      groups: G.
      rows: C.
    """

    row_BTJ: jax.Array
    owner_G: jax.Array | None
    groups: int
    rows: int


def route(
    logits_BTE: jax.Array, top_k: int, norm: bool, probe_E: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The J experts of each token and their gate weights.

    Args:
      logits_BTE: router logits.
      top_k: J.
      norm: whether the weights are divided by their sum over J.
      probe_E: zeros added to all probabilities, to differentiate by; None: none.

    Returns:
      weight_BTJ, softmax over all E at the chosen experts, float32; choice_BTJ, their numbers, by
      falling weight, ties to the lower number. A NaN logit makes the token's weights NaN.

    >>> weight, choice = route(jnp.log(jnp.array([[[0.5, 0.1, 0.4]]])), 2, norm=False)
    >>> weight.round(2).tolist(), choice.tolist()
    ([[[0.5, 0.4]]], [[[0, 2]]])
    """
    p_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32), axis=-1)
    if probe_E is not None:
        p_BTE = p_BTE + probe_E[None, None]
    weight_BTJ, choice_BTJ = jax.lax.top_k(p_BTE, top_k)
    if norm:
        weight_BTJ = weight_BTJ / jnp.sum(weight_BTJ, axis=-1, keepdims=True)
    return weight_BTJ, choice_BTJ


def plan_dropless(choice_BTJ: jax.Array, experts: int) -> Plan:
    """Rows for every choice: an expert takes as many groups of C rows as its choices fill.

    C is a (4 E)-th of the choices, so 5 E groups are always enough and at most about a fifth of
    the rows stays empty.
    """
    choices = choice_BTJ.size
    rows = -(-choices // (_GROUPS * experts))
    groups = choices // rows + experts
    expert_1A = choice_BTJ.reshape(1, choices)
    place_1A, count_1E = _places(expert_1A, experts)
    end_E = jnp.cumsum(-(-count_1E[0] // rows))
    start_E = jnp.concatenate([jnp.zeros_like(end_E[:1]), end_E[:-1]])
    row_1A = start_E[expert_1A] * rows + place_1A
    # Groups behind the last expert's are empty; they borrow its weights.
    owner_G = jnp.sum(end_E[None] <= jnp.arange(groups)[:, None], axis=1)
    return Plan(row_1A.reshape(choice_BTJ.shape), jnp.minimum(owner_G, experts - 1), groups, rows)


def plan_capacity(choice_BTJ: jax.Array, experts: int, factor: float) -> Plan:
    """Rows for the first ⌈factor · J T / E⌉ tokens of each sequence at each expert, T at most.

    First in position: whether a token is dropped depends on no later token and on no other
    sequence.
    """
    b, t, j = choice_BTJ.shape
    capacity = min(t, ceil(factor * j * t / experts))
    expert_BA = choice_BTJ.reshape(b, t * j)
    place_BA, _ = _places(expert_BA, experts)
    row_BA = (expert_BA * b + jnp.arange(b)[:, None]) * capacity + place_BA
    row_BA = jnp.where(place_BA < capacity, row_BA, experts * b * capacity)
    return Plan(row_BA.reshape(choice_BTJ.shape), None, experts, b * capacity)


def _places(expert_BA: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """How many earlier choices of a row went to the same expert, and each expert's count."""
    rank_BA = jnp.argsort(jnp.argsort(expert_BA, axis=1), axis=1)  # both sorts are stable
    count_BE = _counts(expert_BA, experts)
    first_BE = jnp.cumsum(count_BE, axis=1) - count_BE
    return rank_BA - jnp.take_along_axis(first_BE, expert_BA, axis=1), count_BE


def _counts(expert_BA: jax.Array, experts: int) -> jax.Array:
    """How often each expert comes on the last axis."""
    return jnp.sum(expert_BA[..., None] == jnp.arange(experts)[None, None], axis=-2)


def balance_loss(logits_BTE: jax.Array, choice_BTJ: jax.Array) -> jax.Array:
    """Load-balance loss E Σ_e f_e P_e: f the fraction of choices, P the mean probability.

    1 where choices or probabilities are uniform, E where one expert has them all. Gradients flow
    through P only. NaN for a NaN logit.

    Args:
      logits_BTE: router logits.
      choice_BTJ: experts chosen, before any is dropped.

    Returns:
      Float32 scalar.

    References:
      arXiv 2101.03961, Eqs. 4–6, with f over all J choices of a token.

    >>> balance_loss(jnp.zeros((1, 4, 2)), jnp.array([[[0], [0], [0], [1]]])).item()
    1.0
    """
    experts = logits_BTE.shape[-1]
    p_E = jnp.mean(jax.nn.softmax(logits_BTE.astype(jnp.float32), axis=-1), axis=(0, 1))
    return experts * jnp.sum(expert_load(choice_BTJ, experts) * p_E)


def expert_load(choice_BTJ: jax.Array, experts: int) -> jax.Array:
    """Fraction of all choices that went to each expert, float32 (E,), sum 1."""
    return _counts(choice_BTJ.reshape(1, -1), experts)[0].astype(jnp.float32) / choice_BTJ.size


def z_loss(logits_BTE: jax.Array) -> jax.Array:
    """Router z-loss, mean over tokens of (log Σ_e exp z_e)², float32 scalar; NaN for a NaN logit.

    References:
      arXiv 2202.08906, Eq. 5.
    """
    return jnp.mean(jax.nn.logsumexp(logits_BTE.astype(jnp.float32), axis=-1) ** 2)


def auxiliary_loss(config: GPTConfig, losses: dict[str, jax.Array]) -> jax.Array:
    """What a training step adds to its loss, from `apply(..., losses=True)`: a weighted sum.

    `auxiliary_weight` Σ_L balance + `z_weight` Σ_L z; 0 for a dense model.

    >>> config = GPTConfig(experts=4, auxiliary_weight=0.5, z_weight=0.25)
    >>> auxiliary_loss(config, {"balance": jnp.ones(2), "z": 2 * jnp.ones(2)}).item()
    2.0
    """
    balance, z = jnp.sum(losses["balance"]), jnp.sum(losses["z"])
    return config.auxiliary_weight * balance + config.z_weight * z


class ExpertProjection(Projection):
    """A linear map of its own for every expert, kernel (E, in, out)."""

    def __init__(self, shape: tuple[int, ...], std: float, config: GPTConfig):
        """Makes the kernel."""
        super().__init__("GCI,GIO->GCO", shape, std, config)

    def grouped(self, x_GCI: jax.Array, owner_G: jax.Array | None) -> jax.Array:
        """Applies to each group of rows the map of the expert that owns it."""
        if owner_G is None:
            return self(x_GCI)

        def gathered(x_GCI: jax.Array, kernel_EIO: jax.Array, owner_G: jax.Array) -> jax.Array:
            return jnp.einsum(self.equation, x_GCI, kernel_EIO[owner_G])

        # A copy of the matrix for every group: the backward pass makes it again, none is kept.
        kernel_EIO = self.kernel[...].astype(self.dtype)
        return jax.checkpoint(gathered, prevent_cse=False)(x_GCI, kernel_EIO, owner_G)


class MoE(nnx.Module):
    """Σ_J weight · expert(x), and on request a shared expert that every token passes besides.

    The router reads the normalised stream and works in float32. Its kernel is (D, E), the experts'
    are (E, D, F) and (E, F, D).

    References:
      arXiv 2101.03961; arXiv 2401.06066 for shared experts.
    """

    def __init__(self, config: GPTConfig):
        """Builds `router`, `up`, `down`, for SwiGLU `gate`, and on request `shared`."""
        d, f, e = config.model, config.feedforward_F, config.experts
        std = config.block_std
        self.config = config
        self.router = Projection("BTD,DE->BTE", (d, e), std, config, dtype="float32")
        self.up = ExpertProjection((e, d, f), std, config)
        self.gate = (
            ExpertProjection((e, d, f), std, config) if config.activation == "swiglu" else None
        )
        self.down = ExpertProjection((e, f, d), config.residual_std, config)
        self.shared = MLP(config, config.shared_experts * f) if config.shared_experts else None

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        probe_E: jax.Array | None = None,
        losses: bool = False,
        capture: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """Applies the layer; also `balance` and `z`, and what monitors read, where asked for."""
        config = self.config
        logits_BTE = self.router(x_BTD)
        weight_BTJ, choice_BTJ = route(logits_BTE, config.top_k, config.norm_top_k, probe_E)
        if config.capacity_factor is None:
            plan = plan_dropless(choice_BTJ, config.experts)
        else:
            plan = plan_capacity(choice_BTJ, config.experts, config.capacity_factor)
        y_BTJD = self._experts(x_BTD, plan)
        y_BTD = jnp.einsum("BTJD,BTJ->BTD", y_BTJD, weight_BTJ.astype(y_BTJD.dtype))
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        lost = {}
        if losses:
            lost = {"balance": balance_loss(logits_BTE, choice_BTJ), "z": z_loss(logits_BTE)}
        captured = {}
        if capture:
            dropped_BTJ = plan.row_BTJ >= plan.groups * plan.rows
            captured = {
                "router_logits": logits_BTE,
                "expert_load": expert_load(choice_BTJ, config.experts),
                "dropped": jnp.mean(dropped_BTJ.astype(jnp.float32)),
            }
        return y_BTD, lost, captured

    def _experts(self, x_BTD: jax.Array, plan: Plan) -> jax.Array:
        """Each token's result at each of its experts, (B, T, J, D); 0 where dropped."""
        b, t, j = plan.row_BTJ.shape
        x_BTJD = jnp.broadcast_to(x_BTD[:, :, None], (b, t, j, x_BTD.shape[-1]))
        # Adding rows that never meet: the transpose of a sum is a plain gather.
        buffer = jnp.zeros((plan.groups * plan.rows, x_BTD.shape[-1]), x_BTD.dtype)
        buffer = buffer.at[plan.row_BTJ].add(x_BTJD, mode="drop")
        x_GCD = buffer.reshape(plan.groups, plan.rows, -1)
        gate_GCF = None if self.gate is None else self.gate.grouped(x_GCD, plan.owner_G)
        hidden_GCF = activate(gate_GCF, self.up.grouped(x_GCD, plan.owner_G))
        y_GCD = self.down.grouped(hidden_GCF, plan.owner_G)
        y = y_GCD.reshape(buffer.shape)
        return y.at[plan.row_BTJ].get(mode="fill", fill_value=0)
