"""Telling one object from the next."""

from __future__ import annotations

import gc
import weakref

import optax
import pytest

from nnx_probes.device.same import Same


class Thing:
    pass


THING, FILTER = Thing(), lambda path, value: True
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


@pytest.mark.parametrize("x", [THING, FILTER, Thing, TX, (Thing, "kernel", ...), "kernel", None, ()])
def test_the_same_object_is_the_same(x):
    same = Same()
    assert [same.turn_to(x) for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    ("x", "y"),
    [(THING, Thing()), (TX, optax.adam(1e-2)), ((Thing, "a"), (Thing, "b")), (None, THING), (THING, None), (1, True)],
)
def test_another_object_is_another(x, y):
    same = Same()
    same.turn_to(x)
    assert same.turn_to(y) and same.turn_to(x)


def test_what_cannot_be_referred_to_weakly_is_never_the_same():
    same, x = Same(), {"w": 1}
    assert same.turn_to(x) and same.turn_to(x)


@pytest.mark.parametrize("make", [Thing, lambda: (lambda: None, lambda: None)])
def test_nothing_is_kept_alive_and_an_id_given_again_is_another_object(make):
    same = Same()
    x = make()
    gone = weakref.ref(x[0] if isinstance(x, tuple) else x)
    same.turn_to(x)
    del x
    gc.collect()
    assert gone() is None
    assert all(same.turn_to(make()) for _ in range(20))  # each takes the place of the one before
