"""Runs by hand in which something is wrong, each with the facts that are known of it: what causes are explained by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from builders import flow, leaves, numbers, params

from nnx_probes.host.alert import Level
from nnx_probes.host.history import Facts
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Record

NAN = float("nan")


def still(n=24, opt=None, facts=None, loss=lambda s: 1.0, texts=lambda s: "ab", **more):
    """Runs in which parameters stand still, or move as `texts` says."""
    given = {} if opt is None else {"opt": opt}
    return [
        params(s, texts(s), loss=loss(s), **{k: v(s) for k, v in given.items()}, **more) for s in range(n)
    ], facts or Facts()


def trial(update, absorbed=(0.0, 0.0), later=1.0, earlier=1.0):
    return {
        "params.trial_update": np.array(update, np.float32),
        "params.trial_absorbed": np.array(absorbed, np.float32),
        "trial.later": later,
        "trial.earlier": earlier,
    }


def counting(s):
    return dict(step=s)


def moving(s):
    return dict(step=s, moments=f"m{s}")


def one_moves(s):
    return (f"a{s}", "b")


def both_move(s):
    return (f"a{s}", f"b{s}")


def remembering(record):
    """The same record with L-BFGS's memory in the place of Adam's moments."""
    table = record.leaves["optimizer"]
    paths = tuple(path.replace("mu.a", "opt_state.0.diff_params_memory.a") for path in table.paths)
    return replace(record, leaves={**record.leaves, "optimizer": replace(table, paths=paths)})


def standstills():
    """What `frozen_params`, `lost_update` and `optimizer_reset` are explained by."""
    yield still(opt=lambda s: dict(step=0))
    yield still(opt=lambda s: dict(step=0), facts=Facts(watched=True), **{"watch.traced": 1})
    yield still(loss=lambda s: 1 / (s + 1))
    yield still(n=2, texts=lambda s: ("deleted", "deleted"))
    yield still(n=1, opt=lambda s: dict(step=1), **{"optimizer.selects_nothing": True, "optimizer.wrt": "LoRAParam"})
    entered = {"params.norm": np.full(2, 9.0), "watch.missed": False}
    yield [with_values(flow(s, opt=dict(step=s + 1, moments=f"m{s}")), **entered) for s in range(2)], Facts()
    no_rate = trial((0, 0), later=0, earlier=0)
    yield still(opt=lambda s: dict(step=s, learning_rate=0.0), facts=Facts(total_steps=20), **no_rate)
    yield still(opt=moving, **trial((0, 0), later=0, earlier=1))
    yield still(opt=counting, **no_rate)
    records, facts = still(opt=moving, **trial((3e-10, 0.0), (0.5, 0.0), later=2e-9, earlier=0.7))
    yield list(map(remembering, records)), facts
    yield still(opt=lambda s: dict(step=s, zero=True))
    yield still(opt=counting, **trial((0.1, 0.1)))
    yield still(opt=moving, **trial((1e-7, 1e-7), (1.0, 1.0), later=1e-7, earlier=1e-7))
    yield still(opt=lambda s: dict(step=s, mini_step=s, gradient_step=0), facts=Facts(total_steps=20))
    yield still(opt=moving, facts=Facts(other_model=True))
    yield still(opt=counting, texts=lambda s: "ab" if s % 2 else (f"x{s}", "y"))
    yield still(opt=lambda s: dict(step=(5, 6, 1)[min(s, 2)]), texts=both_move)
    yield still(opt=lambda s: dict(step=0), texts=both_move)
    yield still(opt=lambda s: dict(step=(5, 6)[s]) if s < 2 else dict(step=s, count=s), texts=both_move)
    yield still(opt=moving, texts=one_moves, **trial((0.1, 0.0)))
    yield still(opt=moving, texts=one_moves, **{"params.replaced": ("b",)})
    yield still(opt=lambda s: dict(step=s, zero=True), texts=one_moves)
    yield [flow(s, updates=0.0, texts="ab") for s in range(4)], Facts()
    same, other = ("xxh3:a", "xxh3:b"), ("xxh3:c", "xxh3:d")
    yield (
        [flow(s, texts="ab", **{"updates.entry": same, "updates.leaving": other if s else same}) for s in range(2)],
        Facts(),
    )


def halves(dtype="float16"):
    return leaves(dtypes=(dtype, "float32"))


def bad(step=0, nonfinite=(0, 4), table=None, grads=1.0, batch=None, **more):
    """A record with bad parameters and what else is given; `batch` counts the bad elements of a batch of integers."""
    record = flow(step, nonfinite=nonfinite, grads=grads, **({} if table is None else {"table": table}), **more)
    if batch is None:
        return record
    extra = {"batch.nonfinite": np.array([batch], np.int32), "batch.max_int": 50257.0}
    return Record(step, 0.0, {**record.values, **extra}, {**record.leaves, "batch": leaves("batch", ("x",))})


def breakdowns():
    """What `nonfinite` and `skipped_updates` are explained by."""
    seen = {"params.largest": 1.0}
    yield [bad(loss=NAN, batch=3)], Facts()
    small = leaves(paths=("positions.embedding", "tokens.embedding"), shapes=((9, 2), (50257, 2)))
    yield [bad(loss=NAN, batch=0, nonfinite=(4, 4), table=small)], Facts()
    yield [bad(100 * s, (0, 4 * s), loss=NAN if s else 1.0, steps=100, batch=0, **seen) for s in range(2)], Facts()
    yield [bad(nonfinite=(0, 0), loss=NAN, batch=0)], Facts()
    yield [bad(loss=0.5)], Facts()
    yield [bad(nonfinite=(0, 0), grads_bad=(0, 1), loss=0.5)], Facts()
    yield [bad(loss=NAN)], Facts()
    yield [bad(loss=NAN, activations=dict(nonfinite=(0, 7)))], Facts()
    yield [bad(loss=0.5, activations=dict(nonfinite=(0, 7)))], Facts()
    yield [bad(s, (0, 4 * (s == 3)), loss=v) for s, v in enumerate((1.0, 9.0, 80.0, NAN))], Facts()
    yield [flow(0, cosine=0.9), bad(1, loss=NAN)], Facts()
    yield [bad(table=halves(), loss=NAN)], Facts()
    yield [bad(table=halves("float8_e4m3fn"), loss=0.5)], Facts()
    yield [bad(loss=0.5, opt=dict(step=3, notfinite_count=3, total_notfinite=3))], Facts()
    for spread in (0.0, NAN):
        yield [bad(loss=0.5, grads_bad=(0, 1), updates=(spread, NAN), **{"grads.clip_norm": 1.0})], Facts()
    for loss in (NAN, 0.5):
        opts = [dict(step=s, notfinite_count=s, total_notfinite=s) for s in range(12)]
        yield [flow(s, table=halves(), opt=opt, loss=loss) for s, opt in enumerate(opts)], Facts()


LAYER = leaves(paths=("lin.kernel", "lin.bias"), shapes=((4, 4), (4,)))


def gradients():
    """What the rules about gradients, updates and activations are explained by."""
    narrow = leaves(dtypes=("bfloat16",) * 2)
    jump = [1.0] * 70 + [50.0] * 20
    for more in (
        dict(grads=(0.0, 1.0)),
        dict(grads=(1.0, 0.0), activations=dict(dead=0.95)),
        dict(grads=0.0),
        dict(grads=0.0, texts="ab"),
        dict(grads=0.0, table=leaves(), **{"params.max_abs": np.zeros(2, np.float32)}),
        dict(activations=dict(dead=1.0)),
        dict(grads=1e-6, slices=dict(grads=(1.0, 1e-9), ratio=1e-9)),
        dict(grads=(1e-9, 1.0), table=leaves(), ratio=1e-9),
        dict(absorbed=0.75, table=narrow),
        dict(ratio=1.0),
        dict(ratio=1e-9),
        dict(grads=0.0, absorbed=1.0, loss=0.0),
    ):
        yield [flow(s, **{"table": LAYER, "loss": 1.0, **more}) for s in range(40)], Facts()
    yield (
        [flow(s, table=LAYER, grads=0.0, absorbed=1.0, texts="ab", loss=0.0 if s else 1.0) for s in range(40)],
        Facts(),
    )
    for more in ({}, dict(cosine=0.9)):
        yield [flow(s, table=LAYER, loss=v, grads=v, **more) for s, v in enumerate(jump)], Facts()
    yield [flow(s, table=LAYER, loss=1.0, grads=v) for s, v in enumerate(jump)], Facts()
    yield [flow(s, table=LAYER, loss=v) for s, v in enumerate([2.0] * 100 + [7.0] * 30)], Facts()


def batches(record, **values):
    """The same record with a batch of one array of floats, of which these values are known."""
    found = {f"batch.{name}": np.array([value], np.float32) for name, value in values.items()}
    return Record(record.step, 0.0, {**record.values, **found}, {**record.leaves, "batch": leaves("batch", ("x",))})


def jumps():
    """What a batch out of the ordinary is to blame for."""
    large = [1.0] * 70 + [100.0] * 20
    losses = [1.0] * 70 + [50.0] * 20
    yield [batches(flow(s, table=LAYER, grads=v), max_abs=v) for s, v in enumerate(large)], Facts()
    yield [batches(flow(s, table=LAYER, loss=v), max_abs=v) for s, v in enumerate(losses)], Facts()
    yield [batches(flow(s, loss=1.0 if s < 70 else NAN), max_abs=v) for s, v in enumerate(large)], Facts()


def standing(labels=True, loss=None, n=70, by=16, **more):
    """A run whose loss stays that of guessing among 10 classes, with what else is given."""
    score = np.log(10)
    for step in range(0, n * by, by):
        given = loss if step == 0 and loss is not None else score
        record = flow(step, **{"table": LAYER, "loss": given, "steps": by, "opt": False, **more})
        yield classes(record, 10, score) if labels else record


def classes(record, count, entropy, path="y"):
    """The same record with a batch of integers of which this is known; lists for several arrays."""
    found = {"labels.classes": np.ravel(count), "labels.entropy": np.ravel(entropy).astype(np.float64)}
    tables = {**record.leaves, "labels": leaves("labels", (path,) if isinstance(path, str) else path)}
    return Record(record.step, 0.0, {**record.values, **found}, tables)


def with_values(record, **values):
    """The same record with some values replaced."""
    return Record(record.step, 0.0, {**record.values, **values}, record.leaves)


def plateaus():
    """What `chance_level` and `stalled_loss` are explained by."""
    facts = Facts(total_steps=160)
    yield list(standing()), facts
    yield list(standing(labels=False)), facts
    yield list(standing(loss=50.0)), facts
    yield [batches(record, spread=0.0) for record in standing()], facts
    yield [with_values(record, **({"loss": 999.0} if i == 1 else {})) for i, record in enumerate(standing())], facts
    yield [batches(flow(s, table=LAYER, loss=1.0, grads=0.0), spread=0.0) for s in range(8)], Facts()
    yield [with_values(record, **({"loss": 3.0} if i else {})) for i, record in enumerate(standing())], facts
    for more in (
        dict(ratio=1e-7),
        dict(ratio=0.2),
        dict(grads=(0.0, 1.0)),
        dict(activations=dict(dead=1.0)),
        dict(grads=(1e-9, 1.0), table=leaves(), ratio=(1e-9, 1e-3)),
    ):
        yield list(standing(**more)), facts


def evaluated(step, loss, *changed):
    """What ``monitor.on_eval`` makes a record of."""
    more = {"eval.changed": changed, "eval.kinds": ("BatchStat",)} if changed else {}
    return Record(step, 0.0, {"eval.loss": float(loss), **more}, {})


def memorized(*changed):
    """A training loss that falls, and an evaluation every 20 steps that rises from the second on."""
    for step in range(100):
        yield flow(step, table=LAYER, loss=3 * 0.98**step)
        if step % 20 == 19:
            yield evaluated(step, (2.0, 1.0, 1.2, 1.4, 1.6)[step // 20], *changed)


NORM = leaves(
    paths=("lin.kernel", "norm.mean", "drop.count"),
    shapes=((4, 4), (4,), ()),
    kinds=("Param", "BatchStat", "RngCount"),
    trained=(True, False, False),
)


def state(norm="{}", drop="{}", **modes):
    """A run in which the parameters move, and statistics and counters where a text of theirs holds the step."""
    modes = {f"mode.{name}": value for name, value in modes.items()}
    texts = ("k{}", f"n{norm}", f"d{drop}")
    return [params(s, [t.format(s) for t in texts], table=NORM, loss=1 / (s + 1), **modes) for s in range(8)], Facts()


def asides():
    """What `overfitting`, `repeated_batch` and `stale_state` are explained by."""
    yield list(memorized()), Facts()
    yield list(memorized("norm.mean")), Facts()
    yield [flow(s, loss=1 / (s + 1), **{"batch.run": s + 1}) for s in range(5)], Facts()
    yield state(norm="", norm_eval=1, norm_train=0, dropout_eval=0, dropout_train=1, first="norm")
    yield state(norm="", norm_eval=0, norm_train=1)
    yield state(drop="", dropout_eval=0, dropout_train=1)


def all_runs():
    """Every run above."""
    for runs in (standstills, breakdowns, gradients, jumps, plateaus, asides):
        yield from runs()


# --- one rule over the course of a loss -------------------------------------------------------------------

FAR = 99.0
"""An entropy no loss here comes near."""


def judged(rule, records, facts=None, marks=(), raised=()):
    """The alert of this rule about the last record, None if it has none; it is asked about no other."""
    judge = Judge((rule,), facts)
    for record in records:
        judge.observe(record)
        if record.step in marks:
            judge.mark(record.step)
    judge.history.raised.update(dict.fromkeys(raised, Level.WARN))
    found = judge.verdicts(record)
    assert judge.broken == {} and len(found) <= 1
    return found[0] if found else None


def level(*given, **more):
    found = judged(*given, **more)
    return None if found is None else found.level.name


def course(losses, by=1, began=0):
    return [numbers(began + i * by, loss=loss) for i, loss in enumerate(losses)]


def guessing(losses, by=1, began=0, count=10, entropy=FAR, path="y"):
    return [classes(record, count, entropy, path) for record in course(losses, by, began)]
