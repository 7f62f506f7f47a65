"""A reward that anything can learn: small ids."""

from megatron.rl.reward_functions import RewardInput
from tests.megatron.rl.tiny import VOCAB_SIZE


def small_ids(sample: RewardInput) -> float:
    """The share of a response's ids in the lower half of the vocabulary."""
    return float((sample.response_ids < VOCAB_SIZE // 2).mean())
