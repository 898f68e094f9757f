"""`batch`: the tokens of a batch, against themselves and those of the healthy past. NumPy only."""

import numpy as np

from stabmon.audits.case import Case, Outcome, Verdict, acquitted, tokens_of, undecided, vocabulary

NAME = "batch"
# Window of a sequence by which copies are found.
_GRAM = 8


def batch(case: Case) -> Verdict:
    """Whether a batch is text as before: not random, not shuffled, not the same again.

    It convicts of sequences that come twice in a batch (three in four of their 8-grams are the
    same), of tokens in random order (the mutual information of neighbours falls below a third of
    the healthy), of random tokens (those that the healthy batches hardly have, evenly spread, as
    more than 2 % of a uniform source), of ids outside of the vocabulary and of padding only. Other
    text alone is not convicted: it is as unevenly spread as text is.

    Args:
        case: Its batch; `healthy` batches, logits for the size of the vocabulary, padding.
    """
    tokens = tokens_of(case.batch)
    if tokens is None:
        return undecided(NAME, "needs a batch of token ids")
    x = np.concatenate([np.asarray(tokens.inputs), np.asarray(tokens.targets)[:, -1:]], axis=1)
    if case.padding is not None and (x == case.padding).mean() > 0.95:
        return _convict("the batch is padding", "empty batch")
    if (x < 0).any():
        return _convict(f"token id {x.min()} is negative", "bad token ids")
    share = _copies(x)
    numbers = {"copies": share}
    if share > 0:
        return _convict("sequences come twice in the batch", "repeated data", **numbers)
    past = [t for t in map(tokens_of, case.healthy) if t is not None]
    if not past:
        return undecided(NAME, "no copies in it; needs healthy batches for the rest", **numbers)
    old = np.concatenate([np.asarray(t.inputs) for t in past])
    top = int(max(old.max(), x.max())) + 1
    if case.logits is not None:
        top = max(top, vocabulary(case.logits, case.params, case.batch))
    again = _seen_before(x, old)
    numbers["seen before"] = again
    if again > 0.5:
        return _convict("the batch is one of the healthy past again", "repeated data", **numbers)
    numbers["noise"], even = _noise(x, old, top)
    numbers["evenness"] = even
    few = [t.inputs.shape[0] for t in past]
    each = np.split(old, np.cumsum(few)[:-1])
    usual = [_order(np.asarray(part)) for part in each]
    numbers["order"] = _order(x) / max(float(np.median(usual)), 1e-9)
    if numbers["noise"] > 0.02 and even > 0.5:
        text = f"{numbers['noise']:.0%} of the tokens look random"
        return _convict(text, "dirty data", **numbers)
    if numbers["order"] < 1 / 3:
        return _convict(
            "neighbouring tokens have little to do with each other", "shuffled", **numbers
        )
    return acquitted(NAME, "tokens are as in the healthy batches", **numbers)


def _grams(x: np.ndarray) -> list[set[int]]:
    """Hashes of the 8-grams of each sequence."""
    if x.shape[1] < _GRAM:
        return [{hash(row.tobytes())} for row in x]
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.uint64), _GRAM, axis=1)
    weights = np.array([pow(0x9E3779B1, i, 2**61) | 1 for i in range(_GRAM)], np.uint64)
    return [{*map(int, row)} for row in (windows * weights).sum(axis=2)]


def _copies(x: np.ndarray) -> float:
    """Fraction of sequences of which three in four 8-grams stand in an earlier one."""
    grams, found = _grams(x), 0
    for i, mine in enumerate(grams):
        same = any(len(mine & other) > 0.75 * max(len(mine), 1) for other in grams[:i])
        # A sequence of one token over and over is no text to be compared.
        found += same and len(mine) > 1
    return found / max(len(x), 1)


def _seen_before(x: np.ndarray, old: np.ndarray) -> float:
    known = set().union(*_grams(old))
    shares = [len(mine & known) / max(len(mine), 1) for mine in _grams(x)]
    return float(np.mean(shares))


def _noise(x: np.ndarray, old: np.ndarray, top: int) -> tuple[float, float]:
    """Share of a uniform source that the rare tokens tell, and how evenly they are spread."""
    was = np.bincount(old.ravel(), minlength=top) / old.size
    now = np.bincount(x.ravel(), minlength=top) / x.size
    order = np.argsort(was)
    rare = order[np.cumsum(was[order]) < 0.005]
    if len(rare) < 8:
        return 0.0, 0.0
    room = len(rare) / top
    share = float((now[rare].sum() - was[rare].sum()) / max(room - was[rare].sum(), 1e-9))
    counts = now[rare] * x.size
    total = counts.sum()
    if total < 8:
        return max(share, 0.0), 0.0
    # The chance that two of them are the same id: 1 / R where evenly spread.
    pairs = (counts * (counts - 1)).sum() / (total * (total - 1))
    return max(share, 0.0), float(1 / max(pairs * len(rare), 1.0))


def _order(x: np.ndarray) -> float:
    """Mutual information of neighbours, nats, less what a shuffled order of the same tokens has."""
    return _mutual(x) - _mutual(np.random.default_rng(0).permuted(x.ravel()).reshape(x.shape))


def _mutual(x: np.ndarray) -> float:
    a, b = x[:, :-1].ravel().astype(np.int64), x[:, 1:].ravel().astype(np.int64)
    entropy = lambda ids: (lambda p: float(-(p * np.log(p)).sum()))(
        np.unique(ids, return_counts=True)[1] / len(ids)
    )
    return entropy(a) + entropy(b) - entropy(a * (int(x.max()) + 1) + b)


def _convict(sentence: str, cause: str, **numbers: float) -> Verdict:
    return Verdict(NAME, Outcome.CONVICTED, sentence, cause, numbers)
