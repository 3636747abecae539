"""Each recipe does what its description says, seen without the library."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_probes.demo.faults import FAULTS
from nnx_probes.demo.model import LanguageModel, loss_fn
from nnx_probes.demo.recipe import Recipe
from nnx_probes.demo.text import Batch, batches, load

STEPS = 150  # the demo's default
TEXT = load()


@dataclass(frozen=True)
class Trained:
    losses: np.ndarray  # float32[STEPS]
    before: dict[str, bytes]
    after: dict[str, bytes]
    arrays: dict[str, np.ndarray]

    @property
    def unmoved(self) -> set[str]:
        return {path for path, content in self.before.items() if self.after[path] == content}


def arrays_of(model: LanguageModel) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.array(variable[...]) for path, variable in flat}


@functools.cache
def trained(fault: str | None) -> Trained:
    recipe = Recipe() if fault is None else FAULTS[fault].apply(Recipe(), STEPS)
    model = recipe.model(len(TEXT.vocabulary))
    optimizer = nnx.Optimizer(model, recipe.transform, wrt=recipe.wrt)
    before = {path: array.tobytes() for path, array in arrays_of(model).items()}

    @recipe.compile
    def train_step(model: LanguageModel, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [
        train_step(model, optimizer, recipe.edit_batch(step, batch))
        for step, batch in enumerate(batches(TEXT, steps=STEPS))
    ]
    arrays = arrays_of(model)
    after = {path: array.tobytes() for path, array in arrays.items()}
    return Trained(np.array(losses), before, after, arrays)


def test_a_healthy_run_learns_more_than_how_often_characters_occur() -> None:
    run = trained(None)
    assert run.losses[0] > np.log(len(TEXT.vocabulary))
    assert run.losses[-10:].mean() < TEXT.unigram_entropy() - 0.4
    assert not run.unmoved


def test_the_model_is_small() -> None:
    n_elements = sum(array.size for array in trained(None).arrays.values())
    assert 100_000 <= n_elements <= 300_000


def test_no_prediction_depends_on_a_later_character() -> None:
    model = Recipe().model(len(TEXT.vocabulary))
    tokens = next(batches(TEXT, steps=1, batch_size=1))["tokens"]
    changed = tokens.copy()
    changed[0, 40:] = (changed[0, 40:] + 1) % len(TEXT.vocabulary)
    one, two = (np.asarray(model(jax.numpy.asarray(t))) for t in (tokens, changed))
    np.testing.assert_allclose(one[0, :40], two[0, :40], rtol=1e-5, atol=1e-5)
    assert not np.allclose(one[0, 40:], two[0, 40:], atol=1e-2)


@pytest.mark.parametrize("fault", ["jax-jit", "frozen"])
def test_with_the_update_lost_no_parameter_moves_and_the_loss_stays(fault: str) -> None:
    run = trained(fault)
    assert run.unmoved == set(run.before)
    assert run.losses[-10:].mean() > np.log(len(TEXT.vocabulary))


def test_nan_batch_poisons_every_loss_from_a_third_into_the_run() -> None:
    run = trained("nan-batch")
    assert np.flatnonzero(np.isnan(run.losses)).tolist() == list(range(STEPS // 3, STEPS))
    assert all(np.isnan(array).any() for array in run.arrays.values())


def test_nan_batch_leaves_the_caller_s_batch_alone() -> None:
    recipe = FAULTS["nan-batch"].apply(Recipe(), 3)
    batch = next(batches(TEXT, steps=1))
    assert np.isnan(recipe.edit_batch(1, batch)["weights"]).sum() == 1
    assert not np.isnan(batch["weights"]).any()


def test_lr_too_high_first_learns_and_then_ends_as_nan() -> None:
    run = trained("lr-too-high")
    first_bad = int(np.flatnonzero(~np.isfinite(run.losses))[0])
    assert first_bad < STEPS
    assert run.losses[:first_bad].min() < run.losses[0] - 0.5
    assert all(not np.isfinite(array).all() for array in run.arrays.values())


def test_bf16_leaves_whole_kernels_bit_equal_and_nearly_all_of_the_others() -> None:
    run = trained("bf16")
    assert {array.dtype.name for array in run.arrays.values()} == {"bfloat16"}
    kernels = {path for path in run.before if path.endswith("kernel")}
    assert len(run.unmoved & kernels) >= 3
    for path in kernels:
        before, after = (np.frombuffer(x[path], np.uint16) for x in (run.before, run.after))
        assert np.mean(before == after) > 0.999, path
    biases = {path for path in run.before if path.endswith("bias")}
    assert not run.unmoved & biases  # they start at zero, where no update is too small
    assert run.losses[-10:].mean() > np.log(len(TEXT.vocabulary))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_described_on_one_line_of_the_help(fault: object) -> None:
    assert "\n" not in fault.description  # type: ignore[attr-defined]
    assert len(fault.description) <= 95  # type: ignore[attr-defined]


def test_a_fault_changes_only_what_it_is_about() -> None:
    for fault in FAULTS.values():
        assert list(inspect.signature(fault.apply).parameters) == ["recipe", "steps"]
