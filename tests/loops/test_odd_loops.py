"""Loops as people write them: sound ones must be quiet in every form, and a fault must be found in every form."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import (  # noqa: F401  (the two fixtures work by being there)
    BATCH,
    Net,
    batch,
    build,
    compiled_once,
    jitted,
    loud,
    mse,
    nothing_fails_inside,
    observe,
    told,
    train,
)

import nnx_probes as probes

BATCHES = [batch(seed) for seed in range(8)]


def tree_train(model, optimizer, data):
    loss, grads = nnx.value_and_grad(mse, graph=False)(model, data)
    optimizer.update(model, grads)
    return loss


# --- where the step runs ------------------------------------------------------------------------------------

STEPS = {
    "eager": lambda m, o: train,
    "graph": lambda m, o: jitted,
    "tree": lambda m, o: nnx.jit(tree_train, graph=False),
    "donated": lambda m, o: nnx.jit(train, donate_argnums=(0, 1)),
    "partial": lambda m, o: _without_objects(nnx.cached_partial(nnx.jit(train), m, o)),
    "donated-partial": lambda m, o: _without_objects(nnx.cached_partial(nnx.jit(train, donate_argnums=(0, 1)), m, o)),
}
FORMS = pytest.mark.parametrize("form", STEPS)
EVERY = pytest.mark.parametrize("every", [1, 5])


def _without_objects(step):
    return lambda model, optimizer, data: step(data)


def run_form(form, *, tx=None, steps, every, watch):
    model, optimizer = build(tx)
    if watch:
        optimizer = probes.watch(optimizer, model)
    step = STEPS[form](model, optimizer)
    return observe(lambda i, o: step(model, o, BATCHES[i % 8]), model, optimizer, steps=steps, every=every)


@FORMS
@pytest.mark.parametrize(("every", "watch"), [(1, False), (5, True)])
def test_every_form_of_a_sound_step_is_quiet(form, every, watch):
    steps = 12 if form == "eager" else 40
    assert told(run_form(form, steps=steps, every=every, watch=watch)) == []


@FORMS
def test_a_learning_rate_of_zero_is_found_in_every_form(form):
    alerts = run_form(form, tx=optax.adam(0.0), steps=6, every=1, watch=False)
    assert told(alerts) == [("frozen_params", "ERROR", "learning_rate_zero")]


# --- functional loops ---------------------------------------------------------------------------------------


class Functional:
    """The loop of flax's performance guide: split once, carry the state through jax.jit."""

    def __init__(self, tx=None, donate=False):
        self.model, self.optimizer = build(tx)
        self.graphdef, self.state = nnx.split((self.model, self.optimizer))
        self._step = jax.jit(self._run, donate_argnums=(0,) if donate else ())

    def _run(self, state, data):
        model, optimizer = nnx.merge(self.graphdef, state)
        loss = train(model, optimizer, data)
        return nnx.state((model, optimizer)), loss

    def step(self, i, keep=True):
        state, loss = self._step(self.state, BATCHES[i % 8])
        if keep:
            self.state = state
        return loss


@EVERY
def test_split_state_that_is_written_back_is_quiet(every):
    loop = Functional()

    def call(i, o):
        loss = loop.step(i)
        nnx.update((loop.model, loop.optimizer), loop.state)
        return loss

    assert told(observe(call, loop.model, loop.optimizer, steps=30, every=every)) == []


@EVERY
@pytest.mark.parametrize("donate", [False, True])
def test_getters_follow_a_functional_loop(every, donate):
    loop = Functional(donate=donate)
    alerts = observe(lambda i, o: loop.step(i), lambda: loop.state[0], lambda: loop.state[1], steps=30, every=every)
    assert alerts == ()


@EVERY
def test_getters_may_return_objects_merged_anew_each_time(every):
    loop = Functional()
    alerts = observe(
        lambda i, o: loop.step(i),
        lambda: nnx.merge(loop.graphdef, loop.state)[0],
        lambda: nnx.merge(loop.graphdef, loop.state)[1],
        steps=80,
        every=every,
    )
    assert alerts == ()


def test_getters_show_that_a_functional_loop_drops_its_state():
    loop = Functional()
    alerts = observe(lambda i, o: loop.step(i, keep=False), lambda: loop.state[0], lambda: loop.state[1], steps=6)
    assert told(alerts) == [("frozen_params", "ERROR", "state_dropped")]


def test_getters_show_that_the_rate_of_a_functional_loop_is_zero():
    loop = Functional(optax.adam(0.0))
    alerts = observe(lambda i, o: loop.step(i), lambda: loop.state[0], lambda: loop.state[1], steps=6)
    assert [(a.rule, a.level.name) for a in alerts] == [("frozen_params", "ERROR")]


def test_state_handed_over_at_each_call_is_followed():
    loop = Functional(donate=True)

    def call(i, o):
        return dict(loss=loop.step(i), model=loop.state[0], optimizer=loop.state[1])

    assert told(observe(call, None, None, steps=30)) == []


class Pytrees:
    """optax alone: no NNX anywhere."""

    def __init__(self, tx, donate=False):
        rng = np.random.default_rng(0)
        self.params = {
            "w": [jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)],
            "b": jnp.zeros((2,)),
        }
        self.state = tx.init(self.params)

        def run(params, state, data):
            def loss_of(p):
                return jnp.mean((jnp.tanh(data[0] @ p["w"][0]) @ p["w"][1] + p["b"] - data[1]) ** 2)

            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self._run = jax.jit(run, donate_argnums=(0, 1) if donate else ())

    def step(self, i):
        self.params, self.state, loss = self._run(self.params, self.state, BATCHES[i % 8])
        return loss


@EVERY
@pytest.mark.parametrize("donate", [False, True])
def test_plain_pytrees_train_quietly(every, donate):
    loop = Pytrees(optax.adamw(1e-2), donate)
    assert (
        told(observe(lambda i, o: loop.step(i), lambda: loop.params, lambda: loop.state, steps=30, every=every)) == []
    )
    assert (
        told(observe(lambda i, o: dict(loss=loop.step(i), model=loop.params), None, None, steps=30, every=every)) == []
    )


def test_plain_pytrees_that_stand_still_are_told():
    loop = Pytrees(optax.sgd(0.0))
    alerts = observe(lambda i, o: loop.step(i), lambda: loop.params, lambda: loop.state, steps=6)
    assert [(a.rule, a.level.name) for a in alerts] == [("frozen_params", "ERROR")]
    assert sorted(alerts[0].paths) == ["b", "w.0", "w.1"]


def test_counting_plain_pytrees_that_stand_still_are_told_with_their_reason():
    loop = Pytrees(optax.adam(0.0))
    alerts = observe(lambda i, o: loop.step(i), lambda: loop.params, lambda: loop.state, steps=6)
    assert [(a.rule, a.level.name) for a in alerts] == [("frozen_params", "ERROR")]
    assert "state_dropped" not in [c.slug for c in alerts[0].causes]


# --- several updates a call ---------------------------------------------------------------------------------

K = 4


def scanned(loop):
    """K updates in one program, by lax.scan over the split state."""

    @jax.jit
    def run(state, data):
        def one(state, _):
            return loop._run(state, data)

        state, losses = jax.lax.scan(one, state, length=K)
        return state, losses.mean()

    def call(i, o):
        loop.state, loss = run(loop.state, BATCHES[i % 8])
        nnx.update((loop.model, loop.optimizer), loop.state)
        return loss

    return call


def unrolled(loop):
    """K updates in one program, by nnx.fori_loop over the live objects."""

    @nnx.jit
    def run(model, optimizer, data):
        def one(_, objects):
            train(*objects, data)
            return objects

        nnx.fori_loop(0, K, one, (model, optimizer))
        return mse(model, data)

    return lambda i, o: run(loop.model, o, BATCHES[i % 8])


@pytest.mark.parametrize("every", [1, K, 10, 3 * K])
@pytest.mark.parametrize("form", [scanned, unrolled])
def test_steps_numbered_by_k_with_k_updates_each_are_quiet(form, every):
    loop = Functional()
    assert told(observe(form(loop), loop.model, loop.optimizer, steps=20, every=every, by=K)) == []
    assert int(loop.optimizer.step[...]) == 20 * K


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("form", [scanned, unrolled])
def test_steps_numbered_by_k_that_change_nothing_are_told(form, every):
    loop = Functional(optax.adam(0.0))
    alerts = observe(form(loop), loop.model, loop.optimizer, steps=10, every=every, by=K)
    assert told(alerts) == [("frozen_params", "ERROR", "learning_rate_zero")]
    assert alerts[0].step <= 12


@pytest.mark.parametrize("every", [1, 10])
def test_watched_updates_in_a_scan_are_quiet(every):
    model, optimizer = build()
    loop = Functional()
    loop.model, loop.optimizer = model, probes.watch(optimizer, model)
    loop.graphdef, loop.state = nnx.split((loop.model, loop.optimizer))
    assert told(observe(scanned(loop), loop.model, loop.optimizer, steps=20, every=every, by=K)) == []


# --- how steps are numbered ---------------------------------------------------------------------------------


def numbered(steps, *, every, step=jitted, tx=None):
    """Runs the loop with these step numbers; returns (probed steps, alerts)."""
    model, optimizer = build(tx)
    with probes.Monitor(None, model=model, optimizer=optimizer, every=every) as monitor:
        probed = [s for i, s in enumerate(steps) if monitor(s, loss=step(model, optimizer, BATCHES[i % 8]))]
    assert monitor.failures == {}
    return probed, monitor.alerts


def test_a_run_that_resumes_at_a_later_step_is_quiet():
    probed, alerts = numbered(range(1234, 1640), every=100)
    assert probed == [1234, 1300, 1400, 1500, 1600] and alerts == ()


def test_a_run_that_resumes_at_a_later_step_is_judged_from_its_first_probes():
    _, alerts = numbered(range(1234, 1640), every=100, tx=optax.adam(0.0))
    assert told(alerts) == [("frozen_params", "ERROR", "learning_rate_zero")]
    assert alerts[0].step == 1300


def test_steps_that_skip_are_quiet():
    probed, alerts = numbered(range(0, 200, 7), every=10)
    assert probed[:5] == [0, 14, 21, 35, 42] and alerts == ()


def test_steps_that_repeat_are_quiet():
    """Micro-batches that share the number of their step."""
    probed, alerts = numbered([s for s in range(12) for _ in range(3)], every=1)
    assert probed == list(range(12)) and alerts == ()


def test_steps_that_start_again_are_told_once_and_go_on():
    probed, alerts = numbered([*range(10), *range(10), *range(10)], every=5)
    assert probed == [0, 5, 0, 5, 0, 5]
    assert [(a.rule, a.level.name, a.step) for a in alerts] == [("usage", "WARN", 0)]
    assert alerts[0].message.startswith("monitor(step) got step 0 after step 9: expected steps that grow.")


def test_an_announced_restart_is_quiet():
    """What the alert about steps that go backwards tells the user to do."""
    model, optimizer = build()
    with probes.Monitor(None, model=model, optimizer=optimizer, every=5) as monitor:
        for epoch in range(3):
            if epoch:
                monitor.mark(0, "restart")
            for step in range(10):
                monitor(step, loss=jitted(model, optimizer, BATCHES[step % 8]))
    assert monitor.failures == {} and monitor.alerts == ()


def test_steps_given_as_arrays_count():
    model, optimizer = build()
    with probes.Monitor(None, model=model, optimizer=optimizer, every=2) as monitor:
        kinds = [np.int64(0), jnp.int32(1), np.array(2), 3, jnp.uint32(4)]
        assert [monitor(s, loss=jitted(model, optimizer, BATCH)) for s in kinds] == [True, False, True, False, True]
    assert monitor.failures == {} and monitor.alerts == ()


# --- how the monitor is called ------------------------------------------------------------------------------


def test_a_monitor_hangs_in_a_list_of_hooks():
    model, optimizer = build(optax.adam(0.0))
    seen = []
    monitor = probes.Monitor(None, model=model, optimizer=optimizer, every=2)
    hooks = [lambda step: seen.append(step) or False, monitor]
    probed = []
    for step in range(9):
        jitted(model, optimizer, BATCH)
        probed += [step for hook in hooks if hook(step)]
    monitor.close()
    assert probed == [0, 2, 4, 6, 8] and len(seen) == 9
    assert told(monitor.alerts) == [("frozen_params", "ERROR", "learning_rate_zero")]


def test_a_hook_may_be_called_with_the_time_and_with_everything():
    model, optimizer = build()
    with probes.Monitor(None, every=1) as monitor:
        for step in range(12):
            loss = jitted(model, optimizer, BATCH)
            assert monitor(step, 0.5 * step, model=model, optimizer=optimizer, metrics={"loss": loss, "n": {"k": step}})
    assert monitor.failures == {} and monitor.alerts == ()


def test_objects_given_at_the_call_go_before_those_given_at_construction():
    model, optimizer = build()
    other, other_optimizer = build()
    with probes.Monitor(None, model=other, optimizer=other_optimizer, every=1) as monitor:
        for step in range(6):
            monitor(step, loss=jitted(model, optimizer, BATCH), model=model, optimizer=optimizer)
    assert monitor.alerts == ()


def test_batches_that_pass_through_the_monitor_need_not_be_handed_over():
    model, optimizer = build()
    bad = (BATCH[0].at[2, 1].set(jnp.nan), BATCH[1])
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1) as monitor:
        for step, data in enumerate(monitor.batches(bad if i == 5 else BATCHES[i] for i in range(7))):
            monitor(step, loss=jitted(model, optimizer, data))
    (alert,) = monitor.alerts
    assert (alert.step, alert.rule, alert.causes[0].slug) == (5, "nonfinite", "nonfinite_batch")
    assert alert.paths[0] == "batch.0"


def test_probes_pass_where_transfers_are_forbidden():
    model, optimizer = build()
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1) as monitor:
        for step in range(12):
            loss = jitted(model, optimizer, BATCHES[step % 8])
            with jax.transfer_guard("disallow"):
                monitor(step, loss=loss, batch=BATCHES[step % 8], metrics={"loss": loss, "step": step})
        with jax.transfer_guard("disallow"):
            monitor.close()
    assert monitor.failures == {} and monitor.alerts == ()


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("tx", [optax.adam(0.0), optax.set_to_zero(), optax.sgd(optax.linear_schedule(0.1, 0.0, 3))])
def test_a_diagnosis_passes_where_transfers_are_forbidden(tx, sync):
    model, optimizer = build(tx)
    x, y = (np.asarray(part) for part in BATCH)
    rules = probes.rules.default(repeated_batch=None)
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1, sync=sync, rules=rules) as monitor:
        for step in range(24):
            loss = jitted(model, optimizer, BATCH)
            with jax.transfer_guard("disallow"):
                monitor(step, loss=loss, batch={"x": x, "y": y})
        with jax.transfer_guard("disallow"):
            monitor.flush()
            monitor.close()
    assert monitor.failures == {}
    assert {a.rule for a in monitor.alerts} == {"frozen_params"} and monitor.alerts[-1].level >= probes.Level.WARN
    assert {a.causes[0].slug for a in monitor.alerts} <= {"learning_rate_zero", "transform_zeroes_updates"}


def test_watching_and_measuring_by_mix64_pass_where_transfers_are_forbidden():
    model, optimizer = build()
    optimizer = probes.watch(optimizer, model)
    callbacks = [
        probes.ParamProbe(fingerprints="mix64"),
        probes.OptimizerProbe(fingerprints="mix64"),
        probes.LossProbe(),
    ]
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1, callbacks=callbacks) as monitor:
        for step in range(12):
            loss = jitted(model, optimizer, BATCH)
            with jax.transfer_guard("disallow"):
                monitor(step, loss=loss)
        with jax.transfer_guard("disallow"):
            monitor.close()
    assert monitor.failures == {} and monitor.alerts == ()


def test_tree_mode_set_by_the_environment_changes_nothing():
    """What flax plans as its default: `nnx.grad` then returns a Module."""
    code = """
        import jax
        from flax import nnx
        from rig import BATCH, build, observe, told, train

        def run(step):
            model, optimizer = build()
            assert isinstance(nnx.grad(lambda m: (m.a.bias[...] ** 2).sum())(model), nnx.Module)
            for watch in (False, True):
                print(told(observe(lambda i, o: step(model, o, BATCH), model, optimizer, steps=6, watch=watch)))

        run(nnx.jit(train))
        run(train)
        run(jax.jit(train))
    """
    here = os.path.dirname(__file__)
    root = os.path.dirname(os.path.dirname(here))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "NNX_GRAPH_MODE": "false",
            "PYTHONPATH": f"{here}{os.pathsep}{root}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *["[]"] * 4,
        "[('frozen_params', 'ERROR', 'state_dropped')]",
        "[('lost_update', 'ERROR', 'state_dropped')]",
    ]


# --- accumulation by hand -----------------------------------------------------------------------------------


@nnx.jit
def gradients(model, data):
    return nnx.value_and_grad(mse)(model, data)


@nnx.jit
def apply(model, optimizer, grads):
    optimizer.update(model, grads)


def accumulate_outside(k):
    """Sums gradients in Python and calls a compiled update on every k-th call."""
    kept = []

    def step(i, model, optimizer):
        loss, grads = gradients(model, BATCHES[i % 8])
        kept.append(grads)
        if len(kept) == k:
            apply(model, optimizer, jax.tree.map(lambda *g: sum(g) / k, *kept))
            kept.clear()
        return loss

    return step


class Sums(nnx.Module):
    """Running sums of the gradients, and how many they hold."""

    def __init__(self, model):
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        params = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self.parts = nnx.List([nnx.Variable(jnp.zeros_like(p)) for p in params])


def accumulate_inside(k):
    """One compiled step that adds the gradients up and updates under nnx.cond."""
    kept = {}

    @nnx.jit
    def run(model, optimizer, sums, data):
        loss, grads = nnx.value_and_grad(mse)(model, data)
        leaves, structure = jax.tree.flatten(grads)
        for part, grad in zip(sums.parts, leaves, strict=True):
            part[...] += grad
        sums.count[...] += 1

        def update(model, optimizer, sums):
            optimizer.update(model, jax.tree.unflatten(structure, [part[...] / k for part in sums.parts]))
            for part in sums.parts:
                part[...] = jnp.zeros_like(part[...])

        nnx.cond(sums.count[...] % k == 0, update, lambda *_: None, model, optimizer, sums)
        return loss

    def step(i, model, optimizer):
        if not kept:
            kept["sums"] = Sums(model)
        return run(model, optimizer, kept["sums"], BATCHES[i % 8])

    return step


FORMS_OF_ACCUMULATION = pytest.mark.parametrize("form", [accumulate_outside, accumulate_inside])


@FORMS_OF_ACCUMULATION
@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("watch", [False, True])
def test_an_update_by_hand_on_every_fourth_call_is_quiet(form, every, watch):
    if form is accumulate_inside and not watch and every < 5:
        pytest.skip("without watch a branch that has not been taken looks like a forgotten update: the next test")
    model, optimizer = build()
    step = form(4)
    alerts = observe(lambda i, o: step(i, model, o), model, optimizer, steps=26, every=every, watch=watch)
    assert int(optimizer.step[...]) == 6
    assert told(alerts) == []


@FORMS_OF_ACCUMULATION
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("k", [4, 8])
def test_updates_far_apart_are_quiet_when_the_rule_is_told_how_far(form, every, k):
    """What `FrozenParams` says to do about a loop that accumulates by hand."""
    model, optimizer = build()
    step = form(k)
    rules = probes.rules.default(frozen_params=probes.rules.FrozenParams(whole=k + 1))
    assert told(observe(lambda i, o: step(i, model, o), model, optimizer, steps=34, every=every, rules=rules)) == []


@pytest.mark.parametrize("watch", [False, True])
def test_an_optimizer_that_takes_its_turn_every_fifth_step_is_quiet(watch):
    """A generator beside its critic: updated at step 0, 5, 10 ..., the monitor called at every step."""
    model, optimizer = build()
    loss = []

    def call(i, o):
        if i % 5 == 0:
            loss[:] = [jitted(model, o, BATCHES[i % 8])]
        return loss[0]

    assert told(observe(call, model, optimizer, steps=40, watch=watch)) == []


# --- restored states ----------------------------------------------------------------------------------------


def rolled_back(announce):
    """Goes back to the state of step 3 at steps 8 and 13, model and optimizer."""
    model, optimizer = build()
    kept = None
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1) as monitor:
        for step in range(20):
            loss = jitted(model, optimizer, BATCH)
            if step == 3:
                kept = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
            if step in (8, 13):
                nnx.update((model, optimizer), jax.tree.map(jnp.copy, kept))
                if announce:
                    monitor.mark(step, "restore")
            monitor(step, loss=loss)
    assert monitor.failures == {}
    return monitor.alerts


def test_an_announced_restore_is_quiet():
    assert rolled_back(announce=True) == ()


def test_a_restore_that_nobody_announced_is_told():
    alerts = rolled_back(announce=False)
    assert told(alerts)[0] == ("optimizer_reset", "ERROR", "state_restored") and alerts[0].step == 8
    assert {c.slug for a in alerts for c in a.causes[:1]} == {"state_restored"}


def test_a_model_that_is_reloaded_at_every_step_is_told():
    model, optimizer = build()
    kept = jax.tree.map(jnp.copy, nnx.state(model))

    def call(i, o):
        if i % 2 == 0:
            nnx.update(model, jax.tree.map(jnp.copy, kept))
            return mse(model, BATCH)
        return jitted(model, o, BATCH)

    alerts = observe(call, model, optimizer, steps=12)
    assert told(alerts) == [("lost_update", "WARN", "state_restored")]


# --- healthy runs -------------------------------------------------------------------------------------------


class Part(nnx.Module):
    """Base of the models below: one hidden layer of width 4."""

    def __init__(self, rngs):
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.b = nnx.Linear(4, 2, rngs=rngs)


class Lora(Part):
    """Frozen weights, trained low-rank factors; the second one starts at zero."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.adapter = nnx.LoRA(3, 2, 4, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x) + self.adapter(x)))


class Tied(nnx.Module):
    """One kernel under two names."""

    def __init__(self, rngs):
        self.enc = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.dec = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.dec.kernel = self.enc.kernel

    def __call__(self, x):
        return self.dec(nnx.tanh(self.enc(x)))[:, :2]


class Gated(Part):
    """A residual branch behind a gate that starts at zero: its layer gets no gradient at the first step."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.branch = nnx.Linear(4, 4, rngs=rngs)
        self.gate = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        h = nnx.tanh(self.a(x))
        return self.b(h + self.gate[...] * self.branch(h))


class Normed(Part):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))


class Average(nnx.Variable):
    pass


class WithAverage(Part):
    """Keeps a moving average of its first kernel."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.average = Average(self.a.kernel[...])

    def __call__(self, x):
        self.average[...] = 0.9 * self.average[...] + 0.1 * jax.lax.stop_gradient(self.a.kernel[...])
        return self.b(nnx.tanh(self.a(x)))


class WithAverageParam(Part):
    """Keeps it as a Param, which `wrt` leaves out."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.ema = nnx.Param(self.a.kernel[...])

    def __call__(self, x):
        self.ema[...] = 0.9 * self.ema[...] + 0.1 * jax.lax.stop_gradient(self.a.kernel[...])
        return self.b(nnx.tanh(self.a(x)))


class Experts(Part):
    """The second layer is used on batches that are marked by a large first element."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.other = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        h = nnx.tanh(self.a(x))
        return self.b(jnp.where(x[0, 0] > 50, self.other(h), h))


def only(name):
    """Labels or mask: True where a path holds `name`."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: any(getattr(k, "key", getattr(k, "name", None)) == name for k in path), params
    )


def parted(params):
    return jax.tree.map(lambda hit: "rest" if hit else "train", only("a")(params))


HEALTHY = {
    "warm-up": dict(tx=optax.adam(optax.linear_schedule(0.0, 1e-2, 20))),
    "warm-up-injected": dict(
        tx=optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.0, 1e-2, 20))
    ),
    "long-flat-start": dict(
        tx=optax.adam(optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(1e-2)], [12]))
    ),
    "multi-steps": dict(tx=optax.MultiSteps(optax.adamw(1e-2), 4)),
    "multi-steps-warm-up": dict(tx=optax.MultiSteps(optax.adam(optax.linear_schedule(0.0, 1e-2, 5)), 4)),
    "cosine-tail": dict(tx=optax.adam(optax.cosine_decay_schedule(1e-2, 100)), total=100),
    "cosine-tail-unknown-length": dict(tx=optax.adam(optax.cosine_decay_schedule(1e-2, 100))),
    "linear-tail": dict(tx=optax.sgd(optax.linear_schedule(1e-1, 0.0, 98)), total=100),
    "cosine-at-rest-for-the-last-steps": dict(tx=optax.adam(optax.cosine_decay_schedule(1e-2, 96)), total=100),
    "linear-at-rest-for-the-last-steps": dict(tx=optax.adam(optax.linear_schedule(1e-2, 0.0, 96)), total=100),
    "injected-at-rest-for-the-last-steps": dict(
        tx=optax.inject_hyperparams(optax.adam)(learning_rate=optax.cosine_decay_schedule(1e-2, 96)), total=100
    ),
    "frozen-backbone": dict(tx=optax.multi_transform({"train": optax.adam(1e-2), "rest": optax.set_to_zero()}, parted)),
    "frozen-by-mask": dict(tx=optax.chain(optax.adam(1e-2), optax.masked(optax.set_to_zero(), only("a")))),
    "lora": dict(model=Lora, wrt=nnx.LoRAParam),
    "tied": dict(model=Tied),
    "gated": dict(model=Gated),
    "lion": dict(tx=optax.lion(1e-3)),
    "sign": dict(tx=optax.sign_sgd(1e-3)),
    "normed": dict(model=Normed),
    "average": dict(model=WithAverage),
    "decay-masked": dict(tx=optax.adamw(1e-2, weight_decay=0.1, mask=only("kernel"))),
    "decay-moves-the-frozen": dict(
        tx=optax.chain(optax.masked(optax.set_to_zero(), only("a")), optax.add_decayed_weights(1e-2), optax.sgd(0.1))
    ),
    "average-param": dict(model=WithAverageParam, wrt=nnx.All(nnx.Param, nnx.Not(nnx.PathContains("ema")))),
    "clipped": dict(tx=optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2))),
    "skips": dict(tx=optax.apply_if_finite(optax.adam(1e-2), 3), spoil=True),
    "contrib": dict(tx=optax.chain(optax.scale_by_schedule(lambda n: 1.0), optax.rmsprop(1e-3))),
}


def _spoiled(i):
    """Every tenth target is infinite: its gradient is not finite, and the step is skipped on purpose."""
    x, y = BATCHES[i % 8]
    return (x, y.at[0, 0].set(jnp.inf)) if i % 10 == 7 else (x, y)


@nnx.jit
def finite_step(model, optimizer, data):
    """Reports the loss over finite targets only."""
    _, grads = nnx.value_and_grad(mse)(model, data)
    optimizer.update(model, grads)
    return jnp.where(jnp.isfinite(data[1]), (model(data[0]) - data[1]) ** 2, 0).mean()


@EVERY
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_quiet(name, every):
    case = HEALTHY[name]
    model, optimizer = build(case.get("tx"), wrt=case.get("wrt", nnx.Param), model=case.get("model", Net)(nnx.Rngs(0)))
    spoil = case.get("spoil", False)
    step = finite_step if spoil else jitted
    alerts = observe(
        lambda i, o: step(model, o, _spoiled(i) if spoil else BATCHES[i % 8]),
        model,
        optimizer,
        steps=100,
        every=every,
        total_steps=case.get("total"),
    )
    assert loud(alerts) == []


@pytest.mark.parametrize("name", ["frozen-backbone", "frozen-by-mask"])
def test_leaves_left_out_on_purpose_are_worth_a_line_at_most(name):
    model, optimizer = build(HEALTHY[name]["tx"])
    alerts = observe(lambda i, o: jitted(model, o, BATCHES[i % 8]), model, optimizer, steps=100)
    assert told(alerts) in ([], [("frozen_params", "INFO", "subset_excluded")])


@EVERY
def test_a_layer_that_only_some_steps_use_is_quiet(every):
    """Once in 20 steps, without momentum: between two uses it is bit-equal."""
    model, optimizer = build(optax.sgd(0.01), model=Experts(nnx.Rngs(0)))
    before = np.asarray(model.other.kernel[...])

    def call(i, o):
        x, y = BATCHES[i % 8]
        return jitted(model, o, (x.at[0, 0].set(99.0), y) if i % 20 == 1 else (x, y))

    assert told(observe(call, model, optimizer, steps=100, every=every)) == []
    assert not np.array_equal(before, np.asarray(model.other.kernel[...]))


@EVERY
@pytest.mark.parametrize("tx", [optax.sgd(0.5), optax.adam(1e-2)], ids=["sgd", "adam"])
def test_a_run_that_has_converged_exactly_is_information_at_most(tx, every):
    """Outputs within the margin cost nothing: after some steps loss and gradient are exactly 0."""
    model, optimizer = build(tx)

    @nnx.jit
    def step(model, optimizer, data):
        def loss_of(m):
            return jnp.mean(jnp.maximum(jnp.abs(m(data[0]) - 0.5) - 0.4, 0))

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    alerts = observe(
        lambda i, o: losses.append(step(model, o, BATCH)) or losses[-1], model, optimizer, steps=150, every=every
    )
    assert losses[0] > 0 and float(losses[-1]) == 0
    assert loud(alerts) == []
