"""Reading limits off an optax transformation."""

from __future__ import annotations

import jax
import optax
import pytest

from nnx_probes.device.chain import clip_norm, skip_limit

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))


@pytest.mark.parametrize(
    "tx",
    [
        optax.clip_by_global_norm(0.5),
        CLIPPED,
        optax.MultiSteps(CLIPPED, 4),
        optax.MultiSteps(CLIPPED, 4).gradient_transformation(),
        optax.apply_if_finite(CLIPPED, 3),
        optax.named_chain(("clip", optax.clip_by_global_norm(0.5)), ("opt", optax.sgd(1.0))),
        optax.chain(optax.clip_by_global_norm(2.0), optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))),
    ],
)
def test_the_smallest_norm_at_which_gradients_are_clipped_is_found(tx):
    assert clip_norm(tx) == 0.5


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(1e-3),
        optax.masked(optax.clip_by_global_norm(0.5), lambda p: jax.tree.map(lambda _: True, p)),
        optax.multi_transform({"a": CLIPPED, "b": optax.sgd(1.0)}, lambda p: jax.tree.map(lambda _: "a", p)),
        optax.clip(0.5),
        object(),
        None,
    ],
)
def test_what_clips_no_whole_gradient_is_passed_over(tx):
    assert clip_norm(tx) is None


def test_the_number_of_updates_that_may_be_skipped_is_found():
    assert skip_limit(optax.apply_if_finite(optax.adam(1e-3), 7)) == 7
    assert skip_limit(optax.chain(optax.apply_if_finite(CLIPPED, 7))) == 7
    assert skip_limit(CLIPPED) is None and skip_limit(None) is None
