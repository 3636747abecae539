"""What a loop can do to the live objects (the rows of FACTS 1), and what a monitor makes of each.

A row that raises in the user's own step (7, 8, 20, 22, 34, 36, 39's gradients) needs no monitor and is not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from rig import (  # noqa: F401  (the two fixtures work by being there)
    BATCH,
    Moves,
    Net,
    build,
    compiled_once,
    jitted,
    mse,
    nothing_fails_inside,
    observe,
    told,
    train,
)

import nnx_probes as probes


@dataclass
class Loop:
    """A loop's live objects and its step: ``call(step, optimizer)`` returns what the monitor gets."""

    model: Any
    optimizer: Any
    call: Any
    kept: dict[str, Any] = field(default_factory=dict)


ROWS = {}
"""Row -> (builder, leaves changed in model and optimizer after 3 calls, optimizer.step, what the losses do)."""


def row(number, params, opt, step, losses):
    def note(make):
        ROWS[number] = (make, params, opt, step, losses)
        return make

    return note


def rows(*numbers):
    return pytest.mark.parametrize("row", [pytest.param(ROWS[n][0], id=f"row{n}") for n in numbers])


HOW = pytest.mark.parametrize(
    "how",
    [
        dict(every=1, steps=7),
        dict(every=3, steps=13),
        dict(every=1, steps=7, watch=True),
        dict(every=3, steps=13, watch=True),
    ],
    ids=["1", "3", "1-watch", "3-watch"],
)
QUIET = pytest.mark.parametrize(
    "how", [dict(every=1, steps=12), dict(every=3, steps=20, watch=True)], ids=["1", "3-watch"]
)
UNWATCHED = pytest.mark.parametrize("how", [dict(every=1, steps=7), dict(every=3, steps=13)], ids=["1", "3"])
WATCHED = pytest.mark.parametrize(
    "how", [dict(every=1, steps=7, watch=True), dict(every=3, steps=13, watch=True)], ids=["1-watch", "3-watch"]
)


def live(step, tx=None, **kwargs):
    """A loop that hands its live objects to `step`."""
    model, optimizer = build(tx, **kwargs)
    return Loop(model, optimizer, lambda i, o: step(model, o, BATCH))


# --- sound steps --------------------------------------------------------------------------------------------


@row("1-eager", "4/4", "10/10", 3, "fall")
def eager():
    return live(train)


@row("1-jit", "4/4", "10/10", 3, "fall")
def nnx_jit():
    return live(jitted)


def tree_train(model, optimizer, data):
    loss, grads = nnx.value_and_grad(mse, graph=False)(model, data)
    optimizer.update(model, grads)
    return loss


@row("1-tree", "4/4", "10/10", 3, "fall")
def tree_mode():
    return live(nnx.jit(tree_train, graph=False))


@row("1-no-graph-updates", "4/4", "10/10", 3, "fall")
def no_graph_updates():
    return live(nnx.jit(train, graph_updates=False))


@row("15", "4/4", "10/10", 3, "fall")
def built_from_a_clone():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(nnx.clone(model), optax.adam(1e-2), wrt=nnx.Param)
    return Loop(model, optimizer, lambda i, o: jitted(model, o, BATCH))


@row("19", "2/4", "6/6", 3, "fall")
def wrt_one_layer():
    return live(jitted, wrt=nnx.All(nnx.Param, nnx.PathContains("a")))


@row("30-both", "4/4", "10/10", 3, "fall")
def donates_both():
    return live(nnx.jit(train, donate_argnums=(0, 1)))


@row("30-model", "4/4", "10/10", 3, "fall")
def donates_model():
    return live(nnx.jit(train, donate_argnums=(0,)))


def partial(make):
    """A loop whose step holds the live objects since its first call."""
    model, optimizer = build()
    loop = Loop(model, optimizer, None)

    def call(i, o):
        if "step" not in loop.kept:
            loop.kept["step"] = make(model, o)
        return loop.kept["step"](BATCH)

    loop.call = call
    return loop


@row("31", "4/4", "10/10", 3, "fall")
def cached_partial():
    return partial(lambda m, o: nnx.cached_partial(nnx.jit(train), m, o))


@row("35", "4/4", "10/10", 3, "fall")
def jit_partial():
    return partial(lambda m, o: nnx.jit_partial(tree_train, m, o, graph=False))


@row("36-graph", "4/4", "14/14", 3, "fall")
def model_and_optimizer():
    """Row 36 fails in tree mode; in graph mode the same objects train."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return Loop(model, optimizer, lambda i, o: model_step(model, o, BATCH))


@nnx.jit
def model_step(model, optimizer, data):
    loss, grads = nnx.value_and_grad(mse)(model, data)
    optimizer.update(grads)
    return loss


class Noisy(nnx.Module):
    """BatchNorm and Dropout: 8 leaves, of which the dropout's key is the only one that no step changes."""

    def __init__(self, rngs):
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.a(x)))[:, :2]


def noisy(step):
    model, optimizer = build(model=Noisy(nnx.Rngs(0)))
    return Loop(model, optimizer, lambda i, o: step(model, o, BATCH))


@row("37-nnx", "7/8", "10/10", 3, "vary")
def noisy_nnx_jit():
    return noisy(jitted)


def returns(**jit):
    """jax.jit returns model and optimizer, the caller rebinds them."""
    model, optimizer = build()
    loop = Loop(model, optimizer, None)

    @jax.jit(**jit)
    def step(model, optimizer, data):
        loss = train(model, optimizer, data)
        return model, optimizer, loss

    def call(i, o):
        m, o = loop.kept.get("new", (model, o))
        m, o, loss = step(m, o, BATCH)
        loop.kept["new"] = (m, o)
        return loss

    loop.call = call
    return loop


@row("5", "0/4", "0/10", 0, "fall")
def rebound_elsewhere():
    return returns()


def handed_on(loop):
    """The same loop, which hands the monitor the objects it goes on with."""
    call = loop.call

    def with_objects(i, o):
        loss = call(i, o)
        return dict(loss=loss, model=loop.kept["new"][0], optimizer=loop.kept["new"][1])

    loop.call = with_objects
    return loop


@row("5-handed", "0/4", "0/10", 0, "fall")
def rebound_and_handed():
    return handed_on(returns())


def split(*, carry, back=None, donate=False):
    """jax.jit over split state; `carry` goes on with the new state, ``back(model, optimizer, new)`` writes it back."""
    model, optimizer = build()
    loop = Loop(model, optimizer, None)

    @jax.jit(static_argnums=0, donate_argnums=(1,) if donate else ())
    def step(graphdef, state, data):
        m, o = nnx.merge(graphdef, state)
        loss = train(m, o, data)
        return loss, nnx.state((m, o))

    def call(i, o):
        if not carry or not loop.kept:
            loop.kept["graphdef"], loop.kept["state"] = nnx.split((model, o))
        loss, loop.kept["state"] = step(loop.kept["graphdef"], loop.kept["state"], BATCH)
        if back is not None:
            back(model, o, loop.kept["state"])
        return loss

    loop.call = call
    return loop


@row("10-written-back", "4/4", "10/10", 3, "fall")
def split_and_written_back():
    return split(carry=True, back=lambda m, o, new: nnx.update((m, o), new))


@row("10-only-written-back", "4/4", "10/10", 3, "fall")
def split_anew_and_written_back():
    return split(carry=False, back=lambda m, o, new: nnx.update((m, o), new))


@row("27", "0/4", "6/16", 3, "stand")
def multi_steps():
    return live(jitted, optax.MultiSteps(optax.adam(1e-2), 4))


# --- nothing arrives ----------------------------------------------------------------------------------------


@row("2", "0/4", "0/10", 0, "stand")
def jax_jit():
    return live(jax.jit(train))


@row("3", "0/4", "0/10", 0, "stand")
def jax_jit_tree_mode():
    @jax.jit
    def step(model, optimizer, data):
        with nnx.set_graph_mode(False):
            return train(model, optimizer, data)

    return live(step)


@row("4", "0/4", "0/10", 0, "stand")
def jax_jit_donating():
    return live(jax.jit(train, donate_argnums=(0, 1)))


@row("9", "0/4", "0/10", 0, "stand")
def split_and_dropped():
    return split(carry=False)


@row("37-jax", "0/8", "0/10", 0, "stand")
def noisy_jax_jit():
    return noisy(jax.jit(train))


@row("23-forgot", "0/4", "0/10", 0, "stand")
def forgot_update():
    @nnx.jit
    def step(model, optimizer, data):
        loss, _ = nnx.value_and_grad(mse)(model, data)
        return loss

    return live(step)


@row("23-tx", "0/4", "0/10", 0, "stand")
def dropped_what_tx_returns():
    @nnx.jit
    def step(model, optimizer, data):
        loss, grads = nnx.value_and_grad(mse)(model, data)
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        optimizer.tx.update(nnx.as_pure(grads), nnx.as_pure(optimizer.opt_state), params)
        return loss

    return live(step)


# --- something else is trained ------------------------------------------------------------------------------


@row("10", "0/4", "0/10", 0, "fall")
def split_and_carried():
    return split(carry=True)


@row("33", "0/4", "0/10", 0, "fall")
def another_model_is_trained():
    model, optimizer = build()
    step = nnx.cached_partial(nnx.jit(train), *build())
    return Loop(model, optimizer, lambda i, o: step(BATCH))


@row("16", "0/4", "10/10", 3, "fall")
def a_clone_is_trained():
    model = Net(nnx.Rngs(0))
    clone = nnx.clone(model)
    optimizer = nnx.Optimizer(clone, optax.adam(1e-2), wrt=nnx.Param)
    return Loop(model, optimizer, lambda i, o: jitted(clone, o, BATCH))


@row("13", "0/4", "10/10", 3, "stand")
def only_the_optimizer_written_back():
    return split(carry=False, back=lambda m, o, new: nnx.update(o, new[1]))


@row("17", "0/4", "14/14", 3, "stand")
def optimizer_holds_a_clone():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(nnx.clone(model), optax.adam(1e-2), wrt=nnx.Param)
    return Loop(model, optimizer, lambda i, o: model_step(model, o, BATCH))


@row("21", "0/4", "6/10", 3, "stand")
def arguments_swapped():
    """The parameters are taken for gradients: the moments of the biases, which are 0, stay 0."""

    @nnx.jit
    def step(model, optimizer, data):
        loss, grads = nnx.value_and_grad(mse)(model, data)
        optimizer.update(grads, model)
        return loss

    return live(step)


# --- the optimizer does not come along ----------------------------------------------------------------------


@row("12", "4/4", "0/10", 0, "fall")
def only_the_model_written_back():
    return split(carry=False, back=lambda m, o, new: nnx.update(m, new[0]))


@row("12-carried", "4/4", "0/10", 0, "fall")
def state_carried_and_only_the_model_written_back():
    return split(carry=True, back=lambda m, o, new: nnx.update(m, new[0]))


@row("14", "4/4", "0/10", 0, "fall")
def optimizer_built_in_the_step():
    @nnx.jit
    def step(model, optimizer, data):
        return train(model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), data)

    return live(step)


# --- updates of nothing -------------------------------------------------------------------------------------


@row("18-lora", "0/4", "2/2", 3, "stand")
def wrt_lora():
    return live(jitted, wrt=nnx.LoRAParam)


@row("18-stats", "0/4", "2/2", 3, "stand")
def wrt_stats():
    return live(jitted, wrt=nnx.BatchStat)


@row("24-adam", "0/4", "10/10", 3, "stand")
def rate_zero():
    return live(jitted, optax.adam(0.0))


@row("24-sgd", "0/4", "1/1", 3, "stand")
def rate_zero_without_state():
    return live(jitted, optax.sgd(0.0))


@row("24-zero", "0/4", "1/1", 3, "stand")
def set_to_zero():
    return live(jitted, optax.set_to_zero())


def cut(tx):
    @nnx.jit
    def step(model, optimizer, data):
        loss, grads = nnx.value_and_grad(lambda m, d: jax.lax.stop_gradient(mse(m, d)))(model, data)
        optimizer.update(model, grads)
        return loss

    return live(step, tx)


@row("25-adam", "0/4", "2/10", 3, "stand")
def stop_gradient():
    return cut(optax.adam(1e-2))


@row("25-sgd", "0/4", "1/1", 3, "stand")
def stop_gradient_without_state():
    return cut(optax.sgd(1e-2))


@row("26", "2/4", "2/10", 3, "vary")  # whether decay alone helps or hurts is up to the data
def stop_gradient_with_decay():
    return cut(optax.adamw(1e-2, weight_decay=0.1))


@row("28", "4/4", "13/13", 3, "stand")  # the third call, past the limit of 2, accepts the NaN
def skips_run_out():
    @nnx.jit
    def step(model, optimizer, data):
        loss, grads = nnx.value_and_grad(mse)(model, data)
        optimizer.update(model, jax.tree.map(lambda g: g * jnp.nan, grads))
        return loss

    return live(step, optax.apply_if_finite(optax.adam(1e-2), 2))


@row("29", "2/4", "1/1", 3, "vary")
def too_small_for_bf16():
    return live(jitted, optax.sgd(1e-7), model=Net(nnx.Rngs(0), dtype=jnp.bfloat16))


@row("32", "4/4", "10/10", 3, "fall")
def submodule_replaced():
    """From step 3 on ``model.a`` is a new layer, which the cached step does not know."""
    loop = cached_partial()
    call = loop.call

    def replacing(i, o):
        if i == 3:
            loop.model.a = nnx.Linear(3, 4, rngs=nnx.Rngs(1))
        return call(i, o)

    loop.call = replacing
    return loop


# --- the facts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ROWS)
def test_the_installed_flax_does_what_the_table_says(number):
    make, params, opt, count, kind = ROWS[number]
    loop = make()
    moves = Moves(loop.model, loop.optimizer)
    outs = [loop.call(i, loop.optimizer) for i in range(3)]
    losses = [float(out["loss"] if isinstance(out, dict) else out) for out in outs]
    assert moves.counts() == [params, opt]
    assert int(loop.optimizer.step[...]) == count
    if kind == "fall":
        assert losses[0] > losses[1] > losses[2]
    if kind == "stand":
        assert losses[0] == losses[1] == losses[2]


# --- what must be quiet -------------------------------------------------------------------------------------


@QUIET
@rows(
    "1-eager", "1-jit", "1-tree", "1-no-graph-updates", "5-handed", "10-written-back", "10-only-written-back", "15", "19",
    "30-both", "30-model", "31", "35", "36-graph", "37-nnx",
)  # fmt: skip
def test_a_sound_loop_is_quiet(row, how):
    loop = row()
    assert told(observe(loop.call, loop.model, loop.optimizer, **how)) == []


@QUIET
def test_objects_that_are_donated_returned_and_handed_over_are_quiet(how):
    loop = handed_on(returns(donate_argnums=(0, 1)))
    assert told(observe(loop.call, loop.model, loop.optimizer, **how)) == []


@pytest.mark.parametrize("every", [1, 3, 4, 5])
@pytest.mark.parametrize("watch", [False, True])
def test_micro_steps_of_multi_steps_are_quiet(every, watch):
    loop = multi_steps()
    assert told(observe(loop.call, loop.model, loop.optimizer, every=every, watch=watch, steps=26)) == []


@pytest.mark.parametrize("every", [1, 3])
def test_a_filter_for_one_layer_stays_quiet_about_the_other_however_long(every):
    loop = wrt_one_layer()
    assert told(observe(loop.call, loop.model, loop.optimizer, every=every, steps=90)) == []


# --- what must be told --------------------------------------------------------------------------------------


@UNWATCHED
@rows("2", "3", "4", "9", "37-jax")
def test_a_step_whose_new_state_is_dropped_is_told(row, how):
    loop = row()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert told(alerts) == [("frozen_params", "ERROR", "state_dropped")]
    assert [c.slug for c in alerts[0].causes][:2] == ["state_dropped", "update_not_called"]
    assert alerts[0].step <= 3


@WATCHED
@rows("2", "3", "4", "9", "37-jax")
def test_a_watched_optimizer_proves_that_the_state_is_dropped(row, how):
    loop = row()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert told(alerts) == [("lost_update", "ERROR", "state_dropped")]
    assert alerts[0].step <= 3


@pytest.mark.parametrize("how", [dict(every=1), dict(every=3), dict(every=1, watch=True), dict(every=3, watch=True)])
def test_a_loss_that_only_varies_with_the_batch_is_no_falling_loss(how):
    from rig import batch

    model, optimizer = build()
    step = jax.jit(train)
    batches = [batch(seed) for seed in range(25)]
    alerts = observe(lambda i, o: step(model, o, batches[i]), model, optimizer, steps=25, **how)
    assert told(alerts)[-1][1:] == ("ERROR", "state_dropped")


@UNWATCHED
@rows("23-forgot", "23-tx")
def test_an_update_that_is_never_called_is_told(row, how):
    loop = row()
    (alert,) = observe(loop.call, loop.model, loop.optimizer, **how)
    assert (alert.rule, alert.level) == ("frozen_params", probes.Level.ERROR)
    assert {c.slug for c in alert.causes[:2]} == {"state_dropped", "update_not_called"}


@WATCHED
@rows("23-forgot", "23-tx")
def test_a_watched_optimizer_knows_that_its_update_is_never_called(row, how):
    loop = row()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert told(alerts) == [("frozen_params", "ERROR", "update_not_called")]


@HOW
@rows("5", "10", "33")
def test_a_loop_that_trains_while_the_live_objects_stand_still_is_a_stale_view(row, how):
    loop = row()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert {(a.level.name, a.causes[0].slug) for a in alerts} == {("WARN", "stale_view")}
    assert {a.rule for a in alerts} <= {"frozen_params", "lost_update"}


@HOW
def test_a_clone_that_trains_in_place_of_the_watched_model_is_a_warning(how):
    loop = a_clone_is_trained()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert told(alerts) == [("frozen_params", "WARN", "other_copy_trained")]


@HOW
@rows("13", "17", "21")
def test_updates_that_go_to_another_copy_are_told(row, how):
    loop = row()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert told(alerts) == [("frozen_params", "ERROR", "other_copy_trained")]


@HOW
def test_donated_state_that_went_elsewhere_is_told_in_words(how):
    loop = split(carry=True, donate=True)  # row 11
    (alert,) = observe(loop.call, loop.model, loop.optimizer, **how)
    assert (alert.rule, alert.level, alert.causes[0].slug) == ("lost_update", probes.Level.WARN, "stale_view")
    assert alert.step == 0 and alert.title == "The model's arrays are gone"
    assert "4 of 4 arrays of the model have been deleted: they were donated" in alert.message
    assert sorted(alert.paths) == ["a.bias", "a.kernel", "b.bias", "b.kernel"]
    assert "their arrays were donated away" in alert.causes[0].why


def test_donated_objects_that_were_returned_and_not_taken_are_told_before_the_next_step_fails():
    model, optimizer = build()  # row 6
    loop = returns(donate_argnums=(0, 1))
    alerts = observe(lambda i, o: loop.call(i, o), loop.model, loop.optimizer, steps=1)
    assert told(alerts) == [("lost_update", "WARN", "stale_view")]
    del model, optimizer


@HOW
@rows("12", "12-carried", "14")
def test_parameters_that_move_without_their_optimizer_are_told(row, how):
    loop = row()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert told(alerts) == [("optimizer_reset", "ERROR", "optimizer_recreated")]


@HOW
@rows("18-lora", "18-stats")
def test_a_filter_that_selects_nothing_is_told_at_once(row, how):
    loop = row()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert told(alerts) == [("frozen_params", "ERROR", "wrt_selects_nothing")]
    assert alerts[0].step == 0


@HOW
@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (rate_zero, "learning_rate_zero"),
        (rate_zero_without_state, "transform_zeroes_updates"),
        (set_to_zero, "transform_zeroes_updates"),
        (stop_gradient, "gradient_cut"),
        (stop_gradient_without_state, "gradient_cut"),
    ],
)
def test_updates_of_zero_are_told_with_their_reason(row, cause, how):
    loop = row()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert ("frozen_params", "ERROR", cause) in told(alerts)
    also = {("zero_gradients", "ERROR", "gradient_cut")} if how.get("watch") and cause == "gradient_cut" else set()
    assert set(told(alerts)) == {("frozen_params", "ERROR", cause)} | also


@HOW
def test_parameters_that_only_decay_are_told(how):
    loop = stop_gradient_with_decay()
    *first, alert = observe(loop.call, loop.model, loop.optimizer, **{**how, "steps": 24})
    assert [a.rule for a in first] == ["zero_gradients"] * how.get("watch", False)
    assert (alert.rule, alert.level, alert.causes[0].slug) == ("frozen_params", probes.Level.WARN, "weight_decay_only")
    assert sorted(alert.paths) == ["a.bias", "b.bias"] and alert.step <= 9


@HOW
def test_a_nan_that_apply_if_finite_lets_through_is_told(how):
    loop = skips_run_out()
    alerts = observe(loop.call, loop.model, loop.optimizer, **how)
    assert ("nonfinite", "ERROR", "nan_accepted_after_skips") in told(alerts)
    assert {a.rule for a in alerts} == {"nonfinite", "skipped_updates"}
    assert max(a.step for a in alerts if a.rule == "nonfinite") == (2 if how["every"] == 1 else 3)


@HOW
def test_updates_that_bf16_rounds_away_are_told_after_eight_updates(how):
    loop = too_small_for_bf16()
    alert, *more = observe(loop.call, loop.model, loop.optimizer, **{**how, "steps": 24})
    assert set(told(more)) <= {
        ("absorbed_updates", "WARN", "absorbed_by_dtype"),
        ("absorbed_updates", "ERROR", "absorbed_by_dtype"),
    }
    assert (alert.rule, alert.level, alert.causes[0].slug) == ("frozen_params", probes.Level.WARN, "absorbed_by_dtype")
    assert sorted(alert.paths) == ["a.kernel", "b.kernel"] and alert.step == (8 if how["every"] == 1 else 9)


@HOW
def test_a_layer_that_was_replaced_behind_the_step_is_told_like_one_that_never_moved(how):
    loop = submodule_replaced()
    alerts = observe(loop.call, loop.model, loop.optimizer, **{**how, "steps": 24})
    assert told(alerts) == [("frozen_params", "WARN", "detached_module")]
    assert sorted(alerts[-1].paths) == ["a.bias", "a.kernel"] and "new object" in alerts[-1].causes[0].why


# --- other kinds of Variables -------------------------------------------------------------------------------


def test_hijax_variables_are_measured():
    with nnx.var_defaults(hijax=True):  # row 38; written outside jit, which flax 0.12.12 no longer lets them be inside
        model, _ = build()

        def write(model):
            model.a.bias[...] += 1.0

        assert told(observe(lambda i, o: write(model), model, None, steps=3)) == []
        assert float(model.a.bias[0]) == 3.0


def test_reference_variables_are_measured():
    with nnx.var_defaults(ref=True):  # row 39: nnx.grad fails, a write inside jax.jit arrives
        model, optimizer = build()

        @jax.jit
        def write(model, optimizer):
            for layer in (model.a, model.b):
                layer.bias[...] += 1.0
                layer.kernel[...] += 1.0
            optimizer.step[...] += 1

        moves = Moves(model)
        assert told(observe(lambda i, o: write(model, optimizer), model, optimizer, steps=3)) == []
        assert moves.counts() == ["4/4"]
