"""Ranges of single flags."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Values that a number may have.

    Args:
        text: the rule in words.
        holds: whether a number is in it.
    """

    text: str
    holds: Callable[[float], bool]


POSITIVE = Range("must be > 0", lambda x: x > 0)
NOT_NEGATIVE = Range("must be >= 0", lambda x: x >= 0)
FRACTION = Range("must be in [0, 1)", lambda x: 0 <= x < 1)
SHARE = Range("must be in (0, 1]", lambda x: 0 < x <= 1)
SEED = Range("must be in [0, 2147483647]", lambda x: 0 <= x < 2**31)

RANGES = {
    name: range_
    for range_, names in (
        (
            POSITIVE,
            """num_epochs rollout_batch_size n_samples_per_prompt num_rollout num_steps_per_rollout
            global_batch_size micro_batch_size max_tokens_per_gpu vocab_size rotary_base
            make_vocab_size_divisible_by max_position_embeddings rope_scaling_factor
            rope_low_freq_factor rope_original_max_position_embeddings lr decoupled_lr adam_eps
            lr_decay_iters lr_wsd_decay_iters save_interval save_retain_interval save_keep_last
            exit_interval exit_duration_in_mins log_interval distributed_timeout_minutes
            num_layers hidden_size
            num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_epsilon
            init_method_std embedding_init_method_std tensor_model_parallel_size
            pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
            expert_tensor_parallel_size virtual_pipeline_model_parallel_size bucket_size
            num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
            recompute_num_layers num_moe_experts moe_router_topk moe_ffn_hidden_size
            microbatch_group_size_per_vp_stage softmax_scale""",
        ),
        (
            NOT_NEGATIVE,
            """max_staleness train_iters lr_warmup_iters lr_warmup_init min_lr decoupled_min_lr
            weight_decay start_weight_decay end_weight_decay clip_grad max_skipped_steps
            sgd_momentum""",
        ),
        (FRACTION, "lr_warmup_fraction adam_beta1 adam_beta2 hidden_dropout attention_dropout"),
        (SHARE, "rollout_top_p rotary_percent"),
        (SEED, "seed"),
    )
    for name in names.split()
}
"""Flags with a range of their own; a flag that is not given has none."""


def out_of_range(name: str, value: Any) -> str | None:
    """The range that a flag's value breaks, in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    range_ = RANGES.get(name)
    return None if range_ is None or value is None or range_.holds(value) else range_.text
