"""Where the supported releases of megatron-core differ: 0.16 on Python 3.11, 0.19 on 3.12.

Whatever asks which core this is, asks here; a release that is no longer supported takes its lines
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.package_info import MAJOR, MINOR
from torch import Tensor

SINCE_0_19 = (MAJOR, MINOR) >= (0, 19)

CORES_OWN_WRITER: Mapping[str, Any] = {"async_strategy": "mcore"} if SINCE_0_19 else {}
"""Arguments of `dist_checkpointing.save`: from 0.19 on its default writer is another package's."""


class _HookedGPTModel(GPTModel):
    """GPTModel of 0.16 with the hook that later cores have, under its names.

    Attention takes all it needs from `packed_seq_params`; there is no multi-token prediction.
    """

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any,
        output_processor: Callable[..., Any],
        output_processor_context: Any = None,
    ) -> Any:
        """Run this stage's layers.

        Args:
            input_ids: [b, s] int64 (thd: b = 1 and s = this rank's rows).
            position_ids: [b, s] int64.
            attention_mask: None; attention reads `packed_seq_params`.
            packed_seq_params: handed to attention.
            output_processor: called on the last stage with `hidden_states` [s, b, H] (s divided
                over tp under sequence parallelism), `output_layer`, `output_weight` ([V/tp, H]
                where embedding and output share it, else None) and `context`.
            output_processor_context: handed through.

        Returns:
            Hidden states [s, b, H] on every stage but the last; there, what the processor returns.
        """
        decoder_input, *_ = self._preprocess(
            input_ids=input_ids, position_ids=position_ids, packed_seq_params=packed_seq_params
        )
        hidden_states = self.decoder(
            hidden_states=decoder_input,
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
        )
        if not self.post_process:
            return hidden_states
        # core's method takes any first stage's embedding, shared or not
        is_shared = self.share_embeddings_and_output_weights
        return output_processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=self.shared_embedding_or_output_weight() if is_shared else None,
            context=output_processor_context,
        )


HookedGPTModel: type[GPTModel] = GPTModel if SINCE_0_19 else _HookedGPTModel
"""GPTModel whose last stage hands hidden states and output layer to an output processor."""


def settings_of_this_core(flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Section of `RunConfig` -> field that only some cores have, or call so -> value.

    Args:
        flags: every flag's value by name.
    """
    no_graphs: list[str] = []  # core's default names a scope that it then calls deprecated
    if not SINCE_0_19:
        return {"transformer": {"cuda_graph_scope": no_graphs}, "ddp": {}}
    backend = flags["moe_flex_dispatcher_backend"]
    return {
        "transformer": {
            "cuda_graph_modules": no_graphs,
            # one field for all backends; it refuses the two that 0.16 had, where they differ
            "moe_flex_dispatcher_num_sms": flags.get(f"moe_{backend}_num_sms"),
            "moe_deepep_num_sms": None,
            "moe_hybridep_num_sms": None,
            # packed micro-batches differ in length from rank to rank
            "moe_hybridep_pad_uneven_dispatch_inputs": backend == "hybridep",
        },
        "ddp": {"fp4_param_gather": flags["fp4_param"]},
    }


_NOT_OFFERED_BY_0_16 = {
    (
        "transformer.moe_extended_tp",
        "transformer.async_tensor_model_parallel_allreduce",
        "transformer.moe_use_legacy_grouped_gemm",
    ): "megatron-core 0.16 ignores it or has a newer flag for it",
    ("ddp.preserve_fp32_weights",): "it is for FSDP, which is not used",
}

_NOT_OFFERED_BY_0_19 = {
    ("transformer.*num_weight_shards", "transformer.*gtp_weight_remat_size"): (
        "weights are divided over tensor-parallel ranks alone"
    ),
    ("transformer.*mup*",): "head, attention and learning rates do not scale by width",
    ("transformer.flash_attention_version",): "attention over packed samples does not ask for it",
    ("transformer.fp8_output_proj",): "the RL head stands where the output layer projects",
    (
        "transformer.fused_residual_rmsnorm",
        "transformer.use_transformer_engine_op_fuser",
        "transformer.use_grouped_gemm_for_*",
        "transformer.moe_single_grouped_*",
        "transformer.*glu_interleave_size",
        "transformer.moe_ncclep_*",
    ): "layers are not built of transformer-engine's fused operations",
    ("transformer.moe_router_quantile_balancing_ema", "transformer.moe_expert_rank_capacity*"): (
        "the loss would depend on which samples a micro-batch holds"
    ),
    ("transformer.mlp_chunks_for_training",): (
        "ranks whose rows differ in number would exchange different numbers of chunks"
    ),
    ("transformer.moe_router_force_biased",): "it is for benchmarks",
    ("transformer.moe_hybridep_pad_uneven_dispatch_inputs",): (
        "it follows from --moe-flex-dispatcher-backend"
    ),
    ("transformer.moe_flex_dispatcher_num_sms",): (
        "it is set by --moe-deepep-num-sms or --moe-hybridep-num-sms"
    ),
    (
        "transformer.overlap_dispatch_backward_with_experts_wgrad",
        "transformer.high_priority_a2a_comm_stream",
        "transformer.moe_paged_stash*",
        "transformer.delta_offload_bytes_across_pp_ranks",
        "transformer.activation_offload_fraction",
        "transformer.fine_grained_offloading_max_inflight_offloads",
    ): "it changes an overlap or an offload that the training step does not do",
    ("ddp.fp4_param_gather",): "it follows from the transformer's --fp4-param-gather",
    ("transformer.nccl_all_reduce_for_prefill",): "it is for inference",
    (
        "optimizer.lion_*",
        "optimizer.soap_*",
        "optimizer.adaptive_muon_*",
        "optimizer.use_layer_wise_distributed_optimizer",
    ): "it belongs to an optimizer that is not offered",
    ("optimizer.grad_norm_skip_threshold",): "only a gradient that is not finite skips a step",
    ("optimizer.optimizer_cuda_graph",): "CUDA graphs are not used",
    ("ddp.num_buckets",): "--ddp-bucket-size says it",
    ("ddp.param_name_patterns_for_fp32_local_accumulation",): (
        "gradients of 16-bit parameters are always summed in fp32"
    ),
}

NOT_OFFERED_BY_THIS_CORE = _NOT_OFFERED_BY_0_19 if SINCE_0_19 else _NOT_OFFERED_BY_0_16
"""Fields that only some cores have and that are no flags, and why; see `flags.tables`."""
