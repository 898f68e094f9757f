"""Each contract holds in a healthy run and is broken by the fault that it is for."""

import json
from dataclasses import replace

import numpy as np
import pytest

from stabmon.contracts import CONTRACTS, Contracts
from stabmon.contracts.contract import Known
from tests.stabmon.contracts.made import LEAVES, PARTS, healthy, run, sample


def setting(*changes):
    """A fault: from step 30 on some numbers are these; a function of (step, old)."""

    def fault(step, values):
        for key, change in changes if step >= 30 else ():
            values[key] = np.asarray(change(step, values[key]), np.float32)
        return values

    return fault


still = lambda step, x: x - x
constant = lambda step, x: 0 * x + 42
layer_one = lambda step, x: np.where(np.arange(len(x)) >= len(x) // 2, 42, x)
all_of = lambda quantity, change: [((quantity, path), change) for path in PARTS]

FAULTS = {
    "moves": (setting((("bits", "layers/q"), layer_one)), "layers/q, layer 1", 40),
    "gradients": (setting((("gradient", "layers/up"), still)), "layers/up", 30),
    "backward": (setting(*all_of("gradient", still)), "all leaves", 30),
    "answers": (setting((("update", "norm"), still)), "norm", 30),
    "moments": (setting((("bits of 0/nu", "norm"), constant)), "0/nu/norm", 40),
    "counts": (setting((("count", "0/count"), lambda step, x: x - 30)), "0/count", 30),
    "rate": (setting(*all_of("size", lambda step, x: 20 * x)), "all updates", 30),
    "batch": (setting((("rows", "batch"), lambda step, x: x // 4)), "batch", 30),
    "types": (setting((("types", "parameter"), lambda step, x: [1, 1, 2])), "parameter norm", 30),
}


def test_a_healthy_run_breaks_none_and_asks_most():
    judge = Contracts()
    assert run(judge) == []
    assert set(judge.holding) >= FAULTS.keys()


@pytest.mark.parametrize("name", FAULTS)
def test_its_fault_breaks_it_with_leaf_and_step(name):
    fault, leaf, since = FAULTS[name]
    verdicts = [x for x in run(Contracts(), fault) if x[0] == name]
    assert [x[1] for x in verdicts] == [leaf]
    assert verdicts[0][2] == since
    assert verdicts[0][3] - since <= 40


def test_what_is_declared_frozen_must_not_move():
    judge = Contracts.declared(lambda path: path == "norm")
    assert {(name, leaf) for name, leaf, *_ in run(judge)} == {("frozen", "norm")}
    freeze = lambda step, values: values | {("bits", "norm"): np.ones(1, np.float32)}
    judge = Contracts.declared(lambda path: path == "norm")
    assert run(judge, freeze) == []
    assert "frozen" in judge.holding


def without_moments(step, values):
    """The norm is frozen by the optimizer; from step 50 on it moves all the same."""
    values = {k: x for k, x in values.items() if not (k[0][:5] == "bits " and k[1] == "norm")}
    values["update", "norm"] = np.zeros(1, np.float32)
    values["bits", "norm"] = np.full(1, max(step - 40, 0), np.float32)
    return values


def test_what_the_optimizer_leaves_alone_is_frozen_without_a_word():
    assert run(Contracts(), without_moments) == [("frozen", "norm", 50, 50)]


def test_updates_that_a_mask_zeroes_are_no_fault_if_it_says_so():
    zero = lambda step, x: (
        x
        | {
            ("update", "norm"): np.zeros(1, np.float32),
            ("bits", "norm"): np.ones(1, np.float32),
        }
    )
    assert run(Contracts(), zero, zeroing=True) == []
    assert {x[:2] for x in run(Contracts(), zero)} == {("answers", "norm")}


def test_an_expert_without_tokens_is_no_fault_but_a_layer_without_is():
    one = setting((("gradient", "layers/up"), lambda step, x: [0.1, 0, 0.1, 0.1, 0.1, 0.1]))
    assert run(Contracts(), one) == []
    layer = setting((("gradient", "layers/up"), lambda step, x: [0.1, 0.1, 0.1, 0, 0, 0]))
    found = run(Contracts(), layer)
    assert [x[:2] for x in found] == [("gradients", "layers/up, layer 1")]


def test_experts_of_their_own_leaves_are_one_layer():
    group = [replace_leaf(f"e/{i}/up", "e/*/up") for i in range(2)]
    values = {("gradient", leaf.path): np.array([i], np.float32) for i, leaf in enumerate(group)}
    now = sample(0, values, leaves=tuple(group))
    assert CONTRACTS["gradients"].rule(now, None, Known()) == {}
    now.values["gradient", "e/1/up"][:] = 0
    now.values["gradient", "x"] = np.ones(1, np.float32)
    broken = CONTRACTS["gradients"].rule(now, None, Known())
    assert broken is not None
    assert set(broken) == {"e/0/up", "e/1/up"}


def replace_leaf(path, group):
    return LEAVES[2]._replace(path=path, group=group)


def test_accumulation_and_a_rate_of_zero_are_no_faults():
    def accumulating(step, values):
        for path in PARTS:
            values["update", path] = np.zeros(PARTS[path], np.float32)
            values["size", path] = np.zeros(PARTS[path], np.float32)
            values["bits", path] = np.ones(PARTS[path], np.float32)
        values["count", "0/count"] = np.array([step // 40], np.float32)
        return values

    assert run(Contracts(), accumulating) == []
    assert run(Contracts(), accumulating, rate=0.0) == []


LOW = tuple(leaf._replace(dtype="bfloat16") for leaf in LEAVES)


def low(taken, copies=None):
    def change(step, values):
        for path, parts in PARTS.items():
            share = taken if path == "norm" else 1.0
            values["changed", path] = np.full(parts, share, np.float32)
            if copies is not None:
                values["copy of 0/master", path] = np.full(parts, copies(step), np.float32)
        if taken < 1:
            values["bits", "norm"] = np.ones(1, np.float32)
        return values

    return change


def test_precision_that_swallows_updates_is_named_alone():
    found = run(Contracts(), low(0.0), leaves=LOW)
    assert [x[:2] for x in found] == [("precision", "norm")]
    assert run(Contracts(), low(1.0), leaves=LOW) == []


def test_with_a_float32_copy_nothing_is_swallowed_but_they_must_not_part():
    assert run(Contracts(), low(0.0, lambda step: 1.0), leaves=LOW) == []
    parted = run(Contracts(), low(0.0, lambda step: 1.0 if step < 50 else 0.9), leaves=LOW)
    assert {x[0] for x in parted} == {"masters"}
    assert {x[2] for x in parted} == {50}


def test_gradients_that_are_never_zeroed_are_seen():
    pile = lambda step, values: (
        values
        | {
            ("gradient", path): np.full(parts, 0.1 * (step + 10), np.float32)
            for path, parts in PARTS.items()
        }
    )
    assert {x[0] for x in run(Contracts(), pile)} == {"zeroed"}


def test_a_rate_in_the_state_is_the_schedules():
    key = "rate", "hyperparams/learning_rate"
    given = lambda rate: lambda step, values: values | {key: np.array([rate], np.float32)}
    assert run(Contracts(), given(1e-3)) == []
    assert [x[:2] for x in run(Contracts(), given(2e-3))] == [key]


def test_updates_follow_the_declared_rate():
    warmup = lambda step: 1e-4 * (step + 10) / 10

    def follow(step, values):
        for path, parts in PARTS.items():
            values["size", path] = np.full(parts, 0.5 * warmup(step), np.float32)
        return values

    assert run(Contracts(), follow, rate=warmup) == []
    assert {x[:2] for x in run(Contracts(), rate=warmup)} == {("rate", "all updates")}


def test_copies_on_devices_are_equal():
    rule = CONTRACTS["replicas"].rule
    assert rule(sample(0, healthy(0)), None, Known()) == {}
    broken = rule(sample(0, healthy(0), unequal=("norm",)), None, Known())
    assert broken is not None
    assert set(broken) == {"norm"}
    assert rule(replace(sample(0, healthy(0)), unequal=None), None, Known()) is None


def test_leaves_that_move_together_are_tied():
    twins = (LEAVES[1], LEAVES[1]._replace(path="layers/k"))

    def parting(at):
        def change(step, values):
            first = np.array([step, step + 1], np.float32)
            return {("bits", "layers/q"): first, ("bits", "layers/k"): first + (step >= at)}

        return change

    assert run(Contracts(), parting(50), leaves=twins) == [("ties", "layers/k", 50, 50)]
    assert run(Contracts(), parting(10), leaves=twins) == []  # equal at the start alone


@pytest.mark.parametrize(
    ("loss", "holds"), [(3.4, True), (3.0, True), (2.0, False), (3.4 * 8, False)]
)
def test_the_first_loss_is_near_the_logarithm_of_the_vocabulary(loss, holds):
    values = healthy(0) | {("loss", "loss"): np.array([loss], np.float32)}
    found = CONTRACTS["first_loss"].rule(sample(0, values), None, Known())
    assert (found == {}) == holds
    trained = values | {("spread", "norm"): np.ones(1, np.float32)}
    assert CONTRACTS["first_loss"].rule(sample(0, trained), None, Known()) is None


def test_two_evaluations_of_one_step_are_equal():
    judge = Contracts()
    judge.held_out(0, 2.5)
    judge.held_out(0, 2.5)
    assert run(judge) == []
    assert "evaluation" in judge.holding
    judge.held_out(90, 2.5)
    judge.held_out(90, 2.6)
    assert [x[:2] for x in run(judge, steps=[100])] == [("evaluation", "held-out loss")]


def test_every_contract_says_where_such_a_fault_was_published():
    assert [x.name for x in CONTRACTS.values() if not x.source] == []


def test_a_resumed_judge_says_what_an_uninterrupted_one_says():
    fault, *_ = FAULTS["gradients"]
    whole = Contracts()
    expected = run(whole, fault, steps=range(0, 100, 10))
    first, second = Contracts(), Contracts()
    said = run(first, fault, steps=range(0, 50, 10))
    second.restore(json.loads(json.dumps(first.state())))
    said += run(second, fault, steps=range(50, 100, 10))
    assert said == expected != []
    assert second.state() == whole.state()
