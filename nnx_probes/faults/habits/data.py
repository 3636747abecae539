"""Habits of the data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import optax

from nnx_probes.faults.data import digits
from nnx_probes.faults.habits.entry import Habit
from nnx_probes.faults.recipe import Batch, Recipe

__all__ = ["DATA"]


def _one_batch(recipe: Recipe) -> Recipe:
    def data(seed: int) -> Iterator[Batch]:
        first = next(recipe.data(seed))
        while True:
            yield first

    return recipe.but(data=data, full_batch=True)


def _cycle(recipe: Recipe) -> Recipe:
    """Two batches by turns, never shuffled."""

    def data(seed: int) -> Iterator[Batch]:
        source = recipe.data(seed)
        pair = [next(source), next(source)]
        while True:
            yield from pair

    return recipe.but(data=data)


def _short_last(recipe: Recipe) -> Recipe:
    """Every twentieth batch holds 5 examples."""

    def edit(step: int, batch: Batch) -> Batch:
        return {name: x[:5] for name, x in batch.items()} if step % 20 == 19 else batch

    return recipe.edit_batches(edit)


def _rare_classes(step: int, batch: Batch) -> Batch:
    """Classes 5 to 9 are seen in one batch of ten only."""
    if step % 10 == 0:
        return batch
    return {**batch, "weight": batch["weight"] * (batch["label"] < 5) + 1e-6}


def _one_spike(step: int, batch: Batch) -> Batch:
    if step != 150:
        return batch
    return {**batch, "label": (batch["label"] + 5) % 10}


def _heavy_tail(step: int, batch: Batch) -> Batch:
    rng = np.random.default_rng(step)
    weight = np.exp(rng.normal(size=batch["weight"].shape)).astype(np.float32)
    return {**batch, "weight": weight}


def _noisy_labels(step: int, batch: Batch) -> Batch:
    rng = np.random.default_rng(step)
    wrong = rng.random(batch["label"].shape) < 0.3
    drawn = rng.integers(0, 10, batch["label"].shape).astype(np.int32)
    return {**batch, "label": np.where(wrong, drawn, batch["label"])}


def _padding(step: int, batch: Batch) -> Batch:
    weight = batch["weight"].copy()
    weight[:, 12 + step % 8 :] = 0
    return {**batch, "weight": weight}


def _switch(step: int, batch: Batch) -> Batch:
    """From step 150 on the pictures are negatives."""
    return {**batch, "input": 1 - batch["input"]} if step >= 150 else batch


def _unscaled(step: int, batch: Batch) -> Batch:
    return {**batch, "input": batch["input"] * 16}


DATA = (
    Habit(
        "tiny_batches", "four examples a batch", "mlp", lambda r: r.but(data=digits(size=4), transform=optax.adam(1e-3))
    ),
    Habit(
        "one_example", "one example a batch", "mlp", lambda r: r.but(data=digits(size=1), transform=optax.adam(3e-4))
    ),
    Habit("large_batches", "a third of the data in each batch", "mlp", lambda r: r.but(data=digits(size=479))),
    Habit("one_batch_declared", "one batch is overfitted on purpose", "mlp", _one_batch),
    Habit("two_batches", "two batches by turns", "recurrent", _cycle),
    Habit("short_last_batch", "the last batch of an epoch is short", "mlp", _short_last),
    Habit("rare_classes", "half the classes are rare", "mlp", lambda r: r.edit_batches(_rare_classes)),
    Habit("one_spike", "one batch has wrong labels", "mlp", lambda r: r.edit_batches(_one_spike)),
    Habit("heavy_tailed_weights", "loss weights from a log-normal", "conv", lambda r: r.edit_batches(_heavy_tail)),
    Habit("noisy_labels", "30 % of the labels are random", "mlp", lambda r: r.edit_batches(_noisy_labels)),
    Habit("padding", "half of each sequence is padding", "transformer", lambda r: r.edit_batches(_padding)),
    Habit(
        "announced_switch",
        "the data changes, and the loop says so",
        "mlp",
        lambda r: r.edit_batches(_switch).but(marks={150: "negatives"}),
    ),
    Habit("unscaled_pixels", "pixels from 0 to 16", "mlp", lambda r: r.edit_batches(_unscaled)),
    Habit("little_data", "128 examples, learnt by heart", "mlp", lambda r: r.but(data=digits(examples=128))),
)
