"""A training loop of megatron-core alone: its model, schedule, loss, DDP and optimizer; no RL.

Only the attention is ours, since core has none for packed samples on a CPU.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.rl.batching import MicroBatch
from megatron.rl.config import RunConfig
from megatron.rl.initialize import Grid
from megatron.rl.model import block_spec
from megatron.rl.step import Trainee


class CoreLoop:
    """The mean loss of all trained tokens, minimized as a pretraining does.

    Args:
        config: the run, of its own: core keeps hooks in it.
        grid: this rank; one pipeline stage.
        like: whose weights to begin with.
    """

    def __init__(self, config: RunConfig, grid: Grid, like: Trainee) -> None:
        transformer = config.transformer
        model = GPTModel(
            transformer,
            transformer_layer_spec=block_spec(config, grid, None),
            vocab_size=config.layout.padded_vocab_size,
            max_sequence_length=0,
            share_embeddings_and_output_weights=(
                not config.model.untie_embeddings_and_output_weights
            ),
            position_embedding_type="none",
            pg_collection=grid.groups,
        )
        self._grid = grid
        self._chunk = DistributedDataParallel(transformer, config.ddp, model)
        self._chunk.load_state_dict(like.chunks[0].state_dict())
        transformer.finalize_model_grads_func = finalize_model_grads
        self._optimizer = get_megatron_optimizer(
            config.optimizer, [self._chunk], use_gloo_process_groups=False
        )

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """One optimizer step.

        Returns:
            The mean loss, over all data-parallel ranks.
        """
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(micro_batches),
            model=[self._chunk],
            num_microbatches=len(micro_batches),
            seq_length=max(m.input_ids.shape[1] for m in micro_batches),
            micro_batch_size=1,
            forward_only=False,
        )
        self._optimizer.step()
        total = torch.stack(sums).sum(0)
        dist.all_reduce(total, group=self._grid.groups.dp_cp)
        return float(total[0] / total[1])


def _forward_step(iterator: Iterator[MicroBatch], chunk: MegatronModule) -> tuple:
    micro_batch = next(iterator)
    mask = micro_batch.batch.loss_mask
    labels = torch.where(mask, micro_batch.batch.labels, 0)
    losses = chunk(
        micro_batch.input_ids,
        micro_batch.position_ids,
        None,
        labels=labels[None],
        packed_seq_params=micro_batch.rows,
    )
    return losses, partial(_masked_sum, mask)


def _masked_sum(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = (losses.flatten().float() * mask).sum()
    num_tokens = mask.sum().int()
    return loss, num_tokens, torch.stack([loss.detach(), num_tokens.float()])
