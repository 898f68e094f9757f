"""Published faults in the form that they have on a CPU, and runs without a fault.

What lives here: what is planted, where, and what should be said. Training and judging are
`experiments/real_faults.py`'s.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.support.mini import init_mini, mini_batch, mini_loss

RATE, EVERY, ONSET = 1e-3, 2, 8


@dataclass(frozen=True)
class Plan:
    """A run with something planted.

    Attributes:
        source: Where it was published; empty for a run without a fault.
        contract: The contract that should be broken.
        leaf: The leaf that should be named, or the start of its name.
        loss: The loss.
        tx: The optimizer.
        init: The parameters.
        change: Applied to (step, params, opt_state) before each step.
        batch: Tokens of a step.
        grads: Applied to (step, gradients).
        rate: The declared learning rate.
        frozen: Leaves that are declared frozen.
        onset: Step of the fault.
    """

    source: str = ""
    contract: str = ""
    leaf: str = ""
    loss: Callable[..., Any] = mini_loss
    tx: Any = field(default_factory=lambda: optax.adamw(RATE))
    init: Callable[[], Any] = init_mini
    change: Callable[..., Any] = lambda step, params, state: (params, state)
    batch: Callable[[int], Any] = mini_batch
    grads: Callable[..., Any] = lambda step, grads: grads
    rate: Callable[[int], Any] = lambda step: RATE
    frozen: Callable[[str], bool] = lambda path: False
    onset: int = 0


def without(*names: str) -> Callable[..., Any]:
    """The loss with no gradient for some leaves."""

    def loss(params, tokens):
        stop = lambda path, x: (
            jax.lax.stop_gradient(x)
            if jax.tree_util.keystr(path, simple=True, separator="/").startswith(names)
            else x
        )
        return mini_loss(jax.tree_util.tree_map_with_path(stop, params), tokens)

    return loss


def from_onset(change: Callable[..., Any]) -> Callable[..., Any]:
    """A change of (params, opt_state) at the onset alone."""
    return lambda step, params, state: change(params, state) if step == ONSET else (params, state)


def drifting(*path: str) -> Callable[..., Any]:
    """Copies of a leaf that part over the devices: each adds its own number."""

    def change(params, state):
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        spec, whole = jax.P("data"), jax.P()
        sides = {"mesh": mesh, "in_specs": (whole, spec), "out_specs": whole, "check_vma": False}
        apart = jax.shard_map(lambda x, number: x + 1e-3 * number[0], **sides)
        numbers = jnp.arange(float(jax.device_count()))
        numbers = jax.device_put(numbers, jax.sharding.NamedSharding(mesh, spec))
        place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, whole))
        params, state = jax.tree.map(place, (params, state))
        node = params
        for name in path[:-1]:
            node = node[name]
        node[path[-1]] = apart(node[path[-1]], numbers)
        return params, state

    return from_onset(change)


def reset_counts(params: Any, state: Any) -> Any:
    """Counters back at 0, moments as they were."""
    whole = lambda x: jnp.zeros_like(x) if x.ndim == 0 and x.dtype == jnp.int32 else x
    return params, jax.tree.map(whole, state)


def twins() -> Any:
    """Parameters with two copies of the embedding."""
    params = init_mini()
    return params | {"copy": params["embed"] + 0}


def of_twins(params: Any, tokens: jax.Array) -> jax.Array:
    """The loss that uses both copies."""
    both = {name: x for name, x in params.items() if name != "copy"}
    return mini_loss(both | {"embed": (params["embed"] + params["copy"]) / 2}, tokens)


def summed(step: Any, grads: Any) -> Any:
    """Gradients of both copies are summed."""
    total = grads["embed"] + grads["copy"]
    return grads | {"embed": total, "copy": total}


def partial_sum(params: Any, state: Any) -> Any:
    """One copy takes a step with its own gradient alone."""
    return params | {"copy": params["copy"] - RATE * params["copy"]}, state


def with_master() -> Any:
    """Adam on a float32 copy; the update takes low-precision parameters to that copy, rounded."""
    inner = optax.adam(RATE)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params):
        return {"inner": inner.init(wide(params)), "master": wide(params)}

    def update(grads, state, params=None):
        steps, new = inner.update(wide(grads), state["inner"], state["master"])
        master = optax.apply_updates(state["master"], steps)
        gap = lambda m, p: m.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32)
        return jax.tree.map(gap, master, params), {"inner": new, "master": master}

    transform: Any = optax.GradientTransformation
    return transform(init, update)


def low() -> Any:
    """Parameters in bfloat16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), init_mini())


def shifted(params: Any, state: Any) -> Any:
    """A master copy that is not the parameters'."""
    return params, state | {"master": jax.tree.map(lambda x: 1.1 * x, state["master"])}


def unfrozen_at_onset() -> Any:
    """Adam on all but the embedding, which gets steps of its own from the onset on."""
    others: Any = lambda tree: {name: name != "embed" for name in tree}
    itself: Any = lambda tree: {name: name == "embed" for name in tree}
    late: Any = lambda step: jnp.where(step < ONSET, 0.0, -RATE)
    adam = optax.masked(optax.adam(RATE), others)
    return optax.chain(adam, optax.masked(optax.scale_by_schedule(late), itself))


WARMUP = optax.linear_schedule(1e-5, RATE, 20)
ATTN = ("layers", "attn", "k")
FAULTS = {
    "every process draws the same batch": Plan(
        *("torchprime#267", "batch", "batch"),
        batch=lambda step: jnp.tile(mini_batch(step, 2), (4, 1)),
    ),
    "fused cross-entropy without a gradient": Plan(
        *("Megatron#1750", "backward", "all leaves"),
        loss=lambda params, tokens: mini_loss(jax.lax.stop_gradient(params), tokens),
    ),
    "routed experts get no gradient": Plan(
        *("KellerJordan/Muon#65", "gradients", "layers/moe/up"),
        loss=without("layers/moe/up", "layers/moe/down"),
    ),
    "positions that never train": Plan(*("OPT", "gradients", "position"), loss=without("position")),
    "norm gains left out of the backward": Plan(
        *("entrenar#257", "gradients", "layers/norm/scale"), loss=without("layers/norm")
    ),
    "LoRA asked for, all weights trained": Plan(
        *("MaxText#5092", "frozen", "layers/attn/q"), frozen=lambda path: path.startswith("layers")
    ),
    "an adapter on a projection that is not used": Plan(
        *("diffusers#11903", "gradients", "adapter"),
        init=lambda: init_mini() | {"adapter": jnp.ones((4, 4))},
    ),
    "freezing undone": Plan(
        *("mmpretrain-702", "frozen", "embed"), tx=unfrozen_at_onset(), onset=ONSET
    ),
    "another rate than declared": Plan(*("TinyLlama#72", "rate", "all updates"), rate=WARMUP),
    "counter wrong after a resume": Plan(
        *("entrenar#257", "counts", "0/count"), change=from_onset(reset_counts), onset=ONSET
    ),
    "norm gradients not summed alike": Plan(
        *("BLOOM", "replicas", "norm/scale"), change=drifting("norm", "scale"), onset=ONSET
    ),
    "shared key heads part": Plan(
        *("bigcode Megatron#11", "replicas", "layers/attn/k/kernel"),
        change=drifting(*ATTN, "kernel"),
        onset=ONSET,
    ),
    "a tied embedding's gradient in part": Plan(
        *("Megatron#844", "ties", "embed"),
        init=twins,
        loss=of_twins,
        grads=summed,
        change=from_onset(partial_sum),
        onset=ONSET,
    ),
    "the low-precision copy parts from its master": Plan(
        *("Megatron PR2789", "masters", ""),
        init=low,
        tx=with_master(),
        change=from_onset(shifted),
        onset=ONSET,
    ),
}
CLEAN = {
    "AdamW": Plan(),
    "AdamW, warm-up": Plan(tx=optax.adamw(WARMUP), rate=WARMUP),
    "SGD": Plan(tx=optax.sgd(RATE)),
    "Lion": Plan(tx=optax.lion(RATE)),
    "Adafactor": Plan(tx=optax.adafactor(RATE)),
    "Muon": Plan(tx=optax.contrib.muon(RATE)),
    "schedule-free": Plan(tx=optax.contrib.schedule_free_adamw(RATE)),
    "accumulation over four": Plan(tx=optax.MultiSteps(optax.adam(RATE), 4)),
    "bfloat16 with a float32 copy": Plan(init=low, tx=with_master()),
}


def lost(state: Any) -> Iterator[tuple[str, str, str, Any]]:
    """(fault, source, leaf, state) of what restores have brought back."""
    zero = lambda x: jnp.zeros_like(x)
    head = state["params"]["head"]
    having = lambda x: state | {"params": state["params"] | {"head": x}}
    yield "a replica's checkpoint is bad", "Megatron#5281", "params/head", having(head + 1)
    yield "zeros written", "deepspeed#6791", "params/head", having(zero(head))
    half = having(head.at[:, :16].set(0))
    yield "a shard not written", "deepspeed#7546", "params/head", half
    new = state | {"opt": jax.tree.map(zero, state["opt"])}
    yield "resumes as new", "deepspeed#6691", "opt/0/count", new
    cast = having(head.astype(jnp.bfloat16).astype(jnp.float32))
    yield "weights rounded in the checkpoint", "Megatron PR2789", "params/head", cast
    key = state | {"key": jax.random.key(9)}
    yield "random streams wrong after a restore", "Megatron PR2658", "key", key
