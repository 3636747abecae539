from __future__ import annotations

import itertools

import numpy as np
import pytest

from nnx_probes.demo.text import Text, batches, load

TEXT = load()


def test_the_text_is_python_s_own_help() -> None:
    decoded = "".join(TEXT.vocabulary[token] for token in TEXT.tokens)
    assert 'The "with" statement is used to wrap the execution' in " ".join(decoded.split())
    assert len(decoded) > 300_000


def test_loading_twice_gives_the_same_tokens() -> None:
    again = load()
    assert again.vocabulary == TEXT.vocabulary
    np.testing.assert_array_equal(again.tokens, TEXT.tokens)


def test_every_token_is_an_index_into_the_vocabulary() -> None:
    assert TEXT.tokens.dtype == np.int32
    assert set(np.unique(TEXT.tokens)) == set(range(len(TEXT.vocabulary)))
    assert list(TEXT.vocabulary) == sorted(set(TEXT.vocabulary))


def test_unigram_entropy_of_equally_frequent_characters_is_the_log_of_their_number() -> None:
    assert Text("abcd", np.arange(4, dtype=np.int32)).unigram_entropy() == pytest.approx(np.log(4))


def test_the_same_seed_gives_the_same_batches_and_another_seed_others() -> None:
    first, again = batches(TEXT, steps=3, seed=1), batches(TEXT, steps=3, seed=1)
    for one, two in zip(first, again, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, two[name])
    one, two = (next(batches(TEXT, steps=1, seed=seed)) for seed in (1, 2))
    assert not np.array_equal(one["tokens"], two["tokens"])


def test_successive_batches_differ() -> None:
    for one, two in itertools.pairwise(batches(TEXT, steps=4)):
        assert not np.array_equal(one["tokens"], two["tokens"])


def test_targets_are_the_tokens_one_character_later() -> None:
    batch = next(batches(TEXT, steps=1, batch_size=2, length=8))
    assert batch["tokens"].shape == batch["targets"].shape == batch["weights"].shape == (2, 8)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert (batch["weights"] == 1).all()
