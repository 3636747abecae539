"""Data that is not what the loop thinks it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nnx_probes.faults.catalogue.entry import Fault
from nnx_probes.faults.data import digits
from nnx_probes.faults.recipe import Batch, Recipe

__all__ = ["INPUTS"]

_LONG = 640
_AT = 100


def _first_again(recipe: Recipe) -> Recipe:
    """The iterator is made anew at every step."""

    def data(seed: int) -> Iterator[Batch]:
        while True:
            yield next(recipe.data(seed))

    return recipe.but(data=data)


def _sticks(recipe: Recipe) -> Recipe:
    """From one step on the same batch comes again and again."""

    def data(seed: int) -> Iterator[Batch]:
        last: Batch = {}
        for step, batch in enumerate(recipe.data(seed)):
            last = batch if step <= 40 else last
            yield {name: x.copy() for name, x in last.items()}

    return recipe.but(data=data)


def _shuffled(step: int, batch: Batch) -> Batch:
    flat = batch["label"].reshape(-1)
    mixed = np.random.default_rng(step).permutation(flat).reshape(batch["label"].shape)
    return {**batch, "label": mixed}


def _blank(step: int, batch: Batch) -> Batch:
    return {**batch, "input": batch["input"] * 0}


def _integer_division(step: int, batch: Batch) -> Batch:
    """Pixels were divided as integers."""
    return {**batch, "input": (batch["input"] * 16).astype(np.int32) // 255 * np.float32(1)}


def _same_row(step: int, batch: Batch) -> Batch:
    """An index that does not move: every row is the first one."""
    return {**batch, "input": np.broadcast_to(batch["input"][:1], batch["input"].shape).copy()}


def _outlier(step: int, batch: Batch) -> Batch:
    if not _AT <= step < _AT + 3:
        return batch
    return {**batch, "input": batch["input"] * 1e5}


INPUTS = (
    Fault(
        "same_batch_from_the_start",
        "the iterator is made anew at every step",
        ("repeated_batch",),
        ("iterator_restarted", "input_pipeline"),
        _first_again,
        ("mlp", "conv", "transformer"),
        within=3,
        kind="repeated",
    ),
    Fault(
        "loader_sticks",
        "from step 40 on the loader gives the same batch",
        ("repeated_batch",),
        ("iterator_restarted", "input_pipeline"),
        _sticks,
        ("experts", "recurrent", "transformer"),
        onset=40,
        within=4,
        kind="repeated",
    ),
    Fault(
        "labels_shuffled",
        "labels are shuffled apart from their inputs",
        ("chance_level",),
        ("labels_unpaired",),
        lambda r: r.edit_batches(_shuffled),
        ("mlp", "conv", "recurrent"),
        steps=_LONG,
        within=520,
    ),
    Fault(
        "labels_shuffled_in_text",
        "targets are shuffled apart from their characters",
        ("chance_level",),
        ("labels_unpaired",),
        lambda r: r.edit_batches(_shuffled),
        ("transformer",),
        steps=_LONG,
        within=520,
    ),
    Fault(
        "input_all_zero",
        "inputs are multiplied by 0",
        ("chance_level", "zero_gradients", "frozen_params"),
        ("constant_input",),
        lambda r: r.edit_batches(_blank),
        ("mlp", "recurrent"),
        steps=_LONG,
        within=520,
    ),
    Fault(
        "pixels_divided_as_integers",
        "uint8 pixels are divided by 255 as integers",
        ("chance_level", "zero_gradients", "frozen_params"),
        ("constant_input",),
        lambda r: r.edit_batches(_integer_division),
        ("experts", "conv"),
        steps=_LONG,
        within=520,
    ),
    Fault(
        "every_row_the_first",
        "an index inside the batch does not move: all rows are the first one",
        ("chance_level",),
        ("constant_input", "labels_unpaired"),
        lambda r: r.edit_batches(_same_row),
        ("mlp", "recurrent"),
        steps=_LONG,
        within=520,
    ),
    Fault(
        "three_batches_unscaled",
        "three batches come without their scaling, 100,000 times too large",
        ("bad_batch", "spike", "diverging", "nonfinite"),
        ("input_pipeline", "learning_rate_too_high"),
        lambda r: r.edit_batches(_outlier),
        ("mlp", "conv"),
        onset=_AT,
        within=4,
    ),
    Fault(
        "few_examples_learnt_by_heart",
        "64 examples, a model that is large for them, and no end",
        ("overfitting",),
        ("memorization",),
        lambda r: r.but(data=digits(examples=64), evaluate_every=40),
        ("mlp", "recurrent"),
        steps=_LONG,
        within=640,
    ),
)
