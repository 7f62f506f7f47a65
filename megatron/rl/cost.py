"""What a sample costs, so that ranks can be given equal work.

The FLOPs of a forward pass over L tokens are a * L + b * L^2 (a backward pass takes twice that):

    2 * weights                     per token, every weight matrix that the token passes
    4 * heads * head size * layers  per pair of a query and one of the L (L + 1) / 2 keys it sees
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from megatron.core.transformer import TransformerConfig

from megatron.rl.config import RunConfig


def sample_costs(lengths: Sequence[int], config: RunConfig) -> list[int]:
    """What samples of these lengths cost, in units of b = 2 * heads * head size * layers FLOPs.

    cost(L) = L * (even_length + L): of a sample of that many tokens, attention costs as much as
    all the rest. Whole numbers, so that every machine makes the same plan.

    Args:
        lengths: tokens of each sample, prompt and response, [N].
        config: the run.

    Returns:
        [N].
    """
    return costs_of(lengths, even_length(config))


def costs_of(lengths: Sequence[int], even: int) -> list[int]:
    """`sample_costs` of a model whose `even_length` is known."""
    tokens = np.asarray(lengths, dtype=np.int64)
    return (tokens * (even + tokens)).tolist()


def even_length(config: RunConfig) -> int:
    """a / b: weights that a token passes / (heads * head size * layers), and 1 for the diagonal."""
    transformer = config.transformer
    width = transformer.num_attention_heads * transformer.kv_channels
    columns = 1 if config.is_critic else config.layout.padded_vocab_size
    weights = transformer.hidden_size * columns + sum(
        _attention_weights(transformer) + _mlp_weights(transformer, is_moe)
        for is_moe in _moe_layers(transformer)
    )
    return round(weights / (width * transformer.num_layers)) + 1


def _attention_weights(transformer: TransformerConfig) -> int:
    """Queries and the output projection, keys and values."""
    heads, groups = transformer.num_attention_heads, transformer.num_query_groups
    return transformer.hidden_size * transformer.kv_channels * 2 * (heads + groups)


def _mlp_weights(transformer: TransformerConfig, is_moe: bool) -> int:
    """The matrices of the MLP, or of the router and the experts that a token goes through."""
    hidden, matrices = transformer.hidden_size, 3 if transformer.gated_linear_unit else 2
    if not is_moe:
        return matrices * hidden * transformer.ffn_hidden_size
    experts = transformer.moe_router_topk * transformer.moe_ffn_hidden_size
    experts += transformer.moe_shared_expert_intermediate_size or 0
    return hidden * (transformer.num_moe_experts + matrices * experts)


def _moe_layers(transformer: TransformerConfig) -> list[bool]:
    """Which layers have experts: every n-th from the first, or as a pattern of 0 and 1 says."""
    if transformer.num_moe_experts is None:
        return [False] * transformer.num_layers
    frequency = transformer.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(transformer.num_layers)]
    return [bool(has_experts) for has_experts in frequency]
