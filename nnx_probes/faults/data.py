"""What the programs are trained on: scikit-learn's digits, and the text of the demo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from nnx_probes.demo.text import batches, load
from nnx_probes.errors import ProbesError
from nnx_probes.faults.recipe import Batch

__all__ = ["digits", "digits_held_out", "text", "text_held_out", "vocabulary"]

_TRAINED = 1437
"""Of the 1797 digits; the others are held out."""
_TEXT_SEED = 10_000


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ProbesError(
            "The fault benchmark trains on scikit-learn's digits, and scikit-learn is not installed: "
            "pip install 'nnx-probes[faults]'."
        ) from error
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)


def _batch(images: np.ndarray, labels: np.ndarray) -> Batch:
    return {"input": images, "label": labels, "weight": np.ones(len(labels), np.float32)}


def digits(*, size: int = 32, examples: int = _TRAINED) -> Callable[[int], Iterator[Batch]]:
    """Returns a maker of iterators: float32[size, 64] in [0, 1], each epoch shuffled anew, whole batches only."""

    def make(seed: int) -> Iterator[Batch]:
        images, labels = _digits()
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(examples)
            for start in range(0, examples - size + 1, size):
                rows = order[start : start + size]
                yield _batch(images[rows], labels[rows])

    return make


def digits_held_out() -> list[Batch]:
    """Returns one batch of the 360 digits that no program is trained on."""
    images, labels = _digits()
    return [_batch(images[_TRAINED:], labels[_TRAINED:])]


@functools.cache
def vocabulary() -> int:
    """Returns how many different characters the text has."""
    return len(load().vocabulary)


def text(*, size: int = 8, length: int = 24) -> Callable[[int], Iterator[Batch]]:
    """Returns a maker of iterators over random excerpts: int32[size, length]."""

    def make(seed: int) -> Iterator[Batch]:
        for item in batches(load(), steps=1 << 30, batch_size=size, length=length, seed=seed):
            yield {"input": item["tokens"], "label": item["targets"], "weight": item["weights"]}

    return make


def text_held_out(length: int = 24) -> list[Batch]:
    """Returns four batches drawn with a seed of their own."""
    drawn = text(size=32, length=length)(_TEXT_SEED)
    return [next(drawn) for _ in range(4)]
