"""Why state beside the parameters stands still, or moves in an evaluation."""

from __future__ import annotations

from nnx_probes.host.causes.entry import Explanation

__all__ = ["STALE"]

_RULES = ("stale_state",)

STALE = (
    Explanation(
        slug="eval_mode_left_on",
        title="The model is in evaluation mode while it trains",
        why="{eval_layers} of {switch_layers} Dropout and BatchNorm layers are set to evaluation, first {eval_first}.",
        fix="Call model.train() after each evaluation, or evaluate on nnx.view(model, deterministic=True, ...) instead.",
        check="Print use_running_average and deterministic of one layer just before the step.",
        rules=_RULES,
        needs=("eval_layers", "!after_eval"),
        base=0.9,
    ),
    Explanation(
        slug="state_dropped",
        title="The step computes new running state and it is thrown away",
        why="The layers are set to training, so the step makes new values; they do not reach this model.",
        fix="Return all of nnx.state(model) from the step, not nnx.Param only, and nnx.update(model, ...) it; or use @nnx.jit.",
        check="Compare nnx.state(model, nnx.BatchStat) inside the step, at its end, with the live one after it.",
        rules=_RULES,
        needs=("!eval_layers", "!after_eval"),
        base=0.75,
        plus={"statistics_here": 0.1},
    ),
    Explanation(
        slug="rng_not_advancing",
        title="Dropout draws the same mask at every step",
        why="The counters of the model's random streams do not move.",
        fix="Let the step return the random state (nnx.RngState) with the rest, or use @nnx.jit on the live model.",
        check="Call the model twice on one input in training mode: two different results are expected.",
        rules=_RULES,
        needs=("!eval_layers", "!after_eval", "counters_here"),
        base=0.7,
        plus={"!statistics_here": 0.2},
    ),
    Explanation(
        slug="train_mode_in_eval",
        title="The evaluation runs in training mode",
        why="{eval_kinds} changed between the step and monitor.on_eval; an evaluation should change nothing.",
        fix="Evaluate on nnx.view(model, deterministic=True, use_running_average=True), or model.eval() and then model.train().",
        check="Evaluate twice: the results must be equal to the last bit.",
        rules=_RULES,
        needs=("after_eval",),
        base=0.85,
    ),
)
