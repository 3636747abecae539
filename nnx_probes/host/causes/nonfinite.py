"""Where a NaN or an Inf came from."""

from __future__ import annotations

from nnx_probes.host.causes.entry import Explanation

__all__ = ["NONFINITE"]

_RULES = ("nonfinite",)

NONFINITE = (
    Explanation(
        slug="nonfinite_batch",
        title="The batch itself holds NaN or Inf",
        why="{batch_words} is not finite.",
        fix="Find the rows with np.isfinite(...) in the input pipeline and drop or repair them.",
        check="Feed the next batch to the restored model: it stays finite.",
        rules=_RULES,
        needs=("batch_bad",),
        base=0.95,
    ),
    Explanation(
        slug="nonfinite_batch",
        title="A batch between the probes held NaN or Inf",
        why="The parameters went bad in {unseen_words}; of those batches only the last was looked at, and it is finite.",
        fix="Check np.isfinite(...) on the batches of those steps in the input pipeline.",
        check="Run those steps again with every=1: the step and the batch leaf are then named.",
        rules=_RULES,
        needs=("unseen", "!batch_bad"),
        base=0.55,
        minus={"grew": 0.2},
    ),
    Explanation(
        slug="label_out_of_range",
        title="A label or token id is outside the range the loss expects",
        why="The loss is not finite although batch and updated parameters are; the batch holds integers up to {batch_max_int}.",
        fix="Check labels.min() >= 0 and labels.max() < num_classes before the step.",
        check="Clip the integers of this batch to the valid range: the loss turns finite.",
        rules=_RULES,
        needs=("loss_bad", "!batch_bad", "params_fine", "batch_ints"),
        base=0.75,
        minus={"grew": 0.2},
    ),
    Explanation(
        slug="nan_gradient_op",
        title="The forward pass is finite, its gradient is not",
        why="The loss of this step is finite ({loss}) and the parameters after it are not.",
        fix=(
            "Look for sqrt or norm at 0, log at 0, a division guarded by where(...) outside instead of inside; "
            "add an epsilon inside the root."
        ),
        check="jax.config.update('jax_debug_nans', True) names the operation.",
        rules=_RULES,
        needs=("params_bad", "loss_fine", "!batch_bad"),
        base=0.75,
        minus={"grew": 0.2, "skips_ran_out": 0.5, "unseen": 0.3},
    ),
    Explanation(
        slug="nonfinite_in_forward",
        title="An operation in the forward pass overflows or divides by zero",
        why="{begin_words} The batch of this step is {batch_state}.",
        fix=(
            "Look for exp/log without logsumexp, a softmax over a fully masked row, a division by an empty count; "
            "use optax's losses on logits."
        ),
        check="jax.config.update('jax_debug_nans', True) names the operation.",
        rules=_RULES,
        needs=("loss_bad", "!batch_bad"),
        base=0.6,
        minus={"grew": 0.15, "unseen": 0.1},
    ),
    Explanation(
        slug="learning_rate_too_high",
        title="The learning rate is too high: training exploded",
        why="Before this {growth_words}.",
        fix="Lower the learning rate (try a tenth), add warm-up or optax.clip_by_global_norm.",
        check="The same run with a tenth of the rate stays finite.",
        rules=_RULES,
        needs=("grew", "!batch_bad"),
        base=0.85,
    ),
    Explanation(
        slug="overflow_low_precision",
        title="float16 or float8 overflowed",
        why="{half_words} leaves are in a type whose largest value is small (65504 for float16).",
        fix="Use bfloat16, or float16 with loss scaling; keep reductions and parameters in float32.",
        check="The same step in float32 is finite.",
        rules=_RULES,
        needs=("half", "!batch_bad"),
        base=0.7,
    ),
    Explanation(
        slug="eps_underflow",
        title="The optimizer's epsilon vanishes in float16",
        why="float16 parameters turned NaN at a step whose loss was finite; Adam's default eps of 1e-8 is 0 in float16.",
        fix="Keep float32 parameters, or pass eps=1e-4 (and eps_root) to the optimizer.",
        check="With a larger eps the parameters stay finite.",
        rules=_RULES,
        needs=("half", "params_bad", "loss_fine", "!batch_bad"),
        base=0.8,
    ),
    Explanation(
        slug="nan_accepted_after_skips",
        title="apply_if_finite ran out of patience and let the NaN through",
        why="The optimizer had skipped {skips} non-finite updates; past its limit it applies them.",
        fix="Find the source of the first skipped update; raise max_consecutive_errors only after that.",
        check="optimizer.opt_state.total_notfinite counts the skipped updates.",
        rules=_RULES,
        needs=("params_bad", "skips_ran_out"),
        base=0.95,
    ),
)
