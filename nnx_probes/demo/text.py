"""Real English text without a download: the help topics that come with every Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

__all__ = ["Batch", "Text", "batches", "load"]


class Batch(TypedDict):
    """One training batch.

    Attributes:
      tokens: int32[batch, length], what the model reads.
      targets: int32[batch, length], the character that follows each token.
      weights: float32[batch, length], what each target counts in the loss. All ones here; a real loop
        masks its padding with it.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, slots=True)
class Text:
    """A text as numbers.

    Attributes:
      vocabulary: the distinct characters, sorted; a token is an index into it.
      tokens: int32[n_characters].
    """

    vocabulary: str
    tokens: np.ndarray

    def unigram_entropy(self) -> float:
        """Returns the loss (nats a character) of the best guess that ignores all context.

        A model below it has learned something about the order of the characters.
        """
        counts = np.bincount(self.tokens, minlength=len(self.vocabulary))
        shares = counts / counts.sum()
        return float(-np.sum(shares * np.log(shares)))


def load() -> Text:
    """Returns Python's own help topics, joined in the order of their names (about 450,000 characters)."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(joined.encode("utf-32-le"), dtype="<u4")
    distinct, tokens = np.unique(codes, return_inverse=True)
    return Text("".join(map(chr, distinct)), tokens.astype(np.int32))


def batches(text: Text, *, steps: int, batch_size: int = 16, length: int = 64, seed: int = 0) -> Iterator[Batch]:
    """Yields `steps` batches of random excerpts; the same seed gives the same batches."""
    rng = np.random.default_rng(seed)
    offsets = np.arange(length + 1)
    for _ in range(steps):
        starts = rng.integers(0, len(text.tokens) - length, size=(batch_size, 1))
        excerpts = text.tokens[starts + offsets]
        yield {
            "tokens": excerpts[:, :-1],
            "targets": excerpts[:, 1:],
            "weights": np.ones((batch_size, length), np.float32),
        }
