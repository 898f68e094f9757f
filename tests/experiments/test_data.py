"""Batches are what the text says at the windows a seed and a step name; bad input is refused."""

import os
import subprocess
import sys

import numpy as np
import pytest

from experiments.data import Corpus, batches, load_corpus, windows

COUNTING = Corpus("counting", np.arange(2000, dtype=np.uint16), 2000)


def test_a_batch_holds_neighbouring_tokens_of_the_training_split():
    data = batches(COUNTING, seed=0, batch=5, context=16)
    for step in (0, 3, 1000):
        batch = data[step]
        assert batch.shape == (5, 17)
        assert batch.dtype == np.int32
        np.testing.assert_array_equal(np.diff(batch, axis=1), 1)
        np.testing.assert_array_equal(batch[:, 0] % 16, 0)
        assert batch.max() < 1800


def test_the_held_out_split_is_the_last_tenth():
    data = batches(COUNTING, seed=0, batch=5, context=16, split="held_out")
    assert min(data[step].min() for step in range(20)) == 1800
    assert sum(len(COUNTING.split(name)) for name in ("train", "held_out")) == 2000
    assert len(COUNTING.split("held_out")) == 200


@pytest.mark.parametrize("context", [900, 300, 13, 2])
def test_each_epoch_visits_every_window_once_in_its_own_order(context):
    order = windows(COUNTING, seed=7, batch=1, context=context)
    count = 1799 // context
    epochs = np.array([order[step][0] for step in range(3 * count)]).reshape(3, count)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(count), (3, 1)))
    if count > 5:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[1], epochs[2])


def test_neighbouring_seeds_do_not_share_orders_one_epoch_apart():
    def epoch(seed, number):
        order = windows(COUNTING, seed=seed, batch=9, context=18)
        return np.concatenate([order[step] for step in range(11 * number - 11, 11 * number)])

    orders = [tuple(epoch(seed, number)) for seed in range(4) for number in (1, 2)]
    assert len(set(orders)) == len(orders)


def test_batches_depend_on_seed_and_step_alone():
    steps = [0, 17, 400, 17, 0]
    first, second = (batches(COUNTING, seed=3, batch=4, context=20) for _ in range(2))
    forwards = {step: first[step] for step in range(401)}
    for step in steps:
        np.testing.assert_array_equal(second[step], forwards[step])
    assert not np.array_equal(batches(COUNTING, seed=4, batch=4, context=20)[0], forwards[0])


def test_another_process_reads_the_same_batches():
    program = (
        "import zlib; from experiments.data import batches, load_corpus;"
        "data = batches(load_corpus(limit=20_000), seed=5, batch=4, context=32);"
        "print(zlib.crc32(b''.join(data[step].tobytes() for step in (0, 9, 5000))))"
    )
    sums = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(sums) == 1


def test_the_standard_library_is_the_default():
    corpus = load_corpus(limit=200_000)
    text = corpus.tokens.tobytes().decode()
    assert (len(text), corpus.vocabulary) == (200_000, 256)
    assert "import" in text


def test_tests_tables_and_third_party_code_are_left_out(tmp_path, monkeypatch):
    kept, left_out = (
        ["abc.py", "email/parser.py", "unittest/case.py"],
        ["test/a.py", "email/test/b.py", "site-packages/numpy/c.py", "_sysconfigdata_x.py",
         "config-3.11-linux/d.py", "encodings/e.py", "f.txt", "__pycache__/g.py"],
    )  # fmt: skip
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert load_corpus().tokens.tobytes().decode().split() == kept


def test_files_of_a_folder_are_joined_in_order_and_hidden_ones_left_out(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"c.txt": "drei", "a.md": "eins", "b/z": "zwei ", ".git/x": "\xff"}.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    assert load_corpus(tmp_path).tokens.tobytes() == b"einszwei drei"
    assert load_corpus(tmp_path, limit=6).tokens.tobytes() == b"einszw"


def test_text_is_read_as_bytes(tmp_path):
    (tmp_path / "text").write_text("für", encoding="utf-8")
    corpus = load_corpus(str(tmp_path / "text"))
    np.testing.assert_array_equal(corpus.tokens, [0x66, 0xC3, 0xBC, 0x72])
    assert corpus.vocabulary == 256


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.u16", "tokens.npy"])
def test_token_files_are_mapped_not_loaded(tmp_path, name):
    tokens = np.random.default_rng(0).integers(0, 50257, 3000).astype("<u2")
    tokens[5] = 50256
    if name.endswith("npy"):
        np.save(tmp_path / name, tokens)
    else:
        tokens.tofile(tmp_path / name)
    corpus = load_corpus(tmp_path / name)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.vocabulary == 50257
    np.testing.assert_array_equal(corpus.tokens, tokens)
    batch = batches(corpus, seed=0, batch=2, context=30)[11]
    start = windows(corpus, seed=0, batch=2, context=30)[11][1] * 30
    np.testing.assert_array_equal(batch[1], tokens[start : start + 31])


def test_a_missing_path_says_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data at .*nowhere: 0 tokens found. Give a"):
        load_corpus(tmp_path / "nowhere")


def test_nothing_to_read_says_so(tmp_path):
    with pytest.raises(ValueError, match="0 tokens found in 0 files, at least one batch is need"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("name", ["empty.txt", "empty.bin", "empty.npy"])
def test_an_empty_file_says_so(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match="0 tokens found"):
        load_corpus(tmp_path / name)


def test_a_short_text_says_how_many_tokens_are_needed(tmp_path):
    (tmp_path / "short.txt").write_text("x" * 100)
    expected = "90 tokens found in the train split, 769 are needed .* about 855 tokens of data"
    with pytest.raises(ValueError, match=expected):
        batches(load_corpus(tmp_path / "short.txt"), seed=0, batch=16, context=48)


def test_exactly_enough_is_enough():
    corpus = Corpus("exact", np.arange(54, dtype=np.uint8), 256)
    assert len(corpus.split()) == 49
    assert batches(corpus, seed=0, batch=4, context=12)[9].shape == (4, 13)
    with pytest.raises(ValueError, match="49 tokens found in the train split, 50 are needed"):
        batches(corpus, seed=0, batch=7, context=7)


def test_a_file_that_is_not_text_is_named_with_the_byte(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"ab\x89PNG")
    with pytest.raises(ValueError, match=r"picture.png is not UTF-8 text \(byte 2 is 0x89\)"):
        load_corpus(tmp_path)


def test_token_files_in_a_folder_of_text_are_refused(tmp_path):
    (tmp_path / "shard.bin").write_bytes(b"abcd")
    with pytest.raises(ValueError, match=r"shard.bin is a token file in a folder"):
        load_corpus(tmp_path)


def test_half_a_token_is_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match="3 bytes, an odd number"):
        load_corpus(tmp_path / "odd.bin")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), np.uint16), "one-dimensional integer array"),
        (np.zeros(12, np.float32), "one-dimensional integer array"),
        (np.array([3, -1]), "a token below 0"),
        (np.array([], np.uint16), "0 tokens found"),
    ],
)
def test_arrays_that_are_not_tokens_are_refused(tmp_path, array, message):
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / "tokens.npy")


def test_a_file_that_only_claims_to_be_an_array_is_refused(tmp_path):
    (tmp_path / "tokens.npy").write_text("no array")
    with pytest.raises(ValueError, match="not a NumPy array file"):
        load_corpus(tmp_path / "tokens.npy")


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"context": 0}, {"seed": -1}])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1 and seed at least 0"):
        batches(COUNTING, **{"seed": 0, "batch": 2, "context": 8} | sizes)


def test_an_unknown_split_and_limit_are_refused():
    with pytest.raises(ValueError, match="unknown split 'test'"):
        COUNTING.split("test")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        load_corpus(limit=0)
