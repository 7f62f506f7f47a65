"""What a run is made of: one frozen dataclass per concern, one field per flag.

The string under a field is its `--help` text. `megatron.rl.flags` makes the flags from these
fields and says which combinations mean something, and `RunConfig` is all that the rest of the
program ever sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.rl.derived import DerivedLayout
from megatron.rl.engine_config import EngineConfig
from megatron.rl.flags.values import written
from slime_loss import (
    AdvantageConfig,
    AggregationConfig,
    HeadConfig,
    PolicyLossConfig,
    ValueLossConfig,
)


@dataclass(frozen=True)
class ModelConfig:
    """The model around the transformer block: vocabulary, rotary embedding, sequence layout."""

    hf_checkpoint: str | None = None
    """Hugging Face directory: its config.json sets the architecture flags, its safetensors the
    initial weights."""

    vocab_size: int | None = None
    """True vocabulary size, before padding."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor parallel size."""

    max_position_embeddings: int | None = None
    """Longest sequence (prompt + response, in tokens) that the model accepts."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own instead of the word embedding's."""

    swiglu: bool = False
    """Gated linear unit with SiLU in the MLP."""

    squared_relu: bool = False
    """Squared ReLU in the MLP."""

    group_query_attention: bool = False
    """Megatron's switch for grouped-query attention; needs --num-query-groups, which alone is
    enough."""

    rotary_base: float = 10000.0
    """Base of the rotary position embedding."""

    rotary_percent: float = 1.0
    """Share of each head's channels that is rotated, in (0, 1]."""

    use_rope_scaling: bool = False
    """Scale rotary frequencies as Llama 3.1 does."""

    rope_scaling_factor: float = 8.0
    """Llama 3.1 scaling: how much longer the context is than the original one."""

    rope_low_freq_factor: float = 1.0
    """Llama 3.1 scaling: wavelengths above original context / this are fully scaled."""

    rope_high_freq_factor: float = 4.0
    """Llama 3.1 scaling: wavelengths below original context / this are left alone."""

    rope_original_max_position_embeddings: int = 8192
    """Llama 3.1 scaling: context length of the original pretraining, in tokens."""

    qkv_format: Literal["thd", "bshd"] = "thd"
    """Layout of a micro-batch: thd packs samples end to end without padding; bshd pads them to
    one length."""

    allgather_cp: bool = False
    """Context parallelism with contiguous slices and an all-gather of keys and values; without
    it each sample is cut in zigzag order."""


@dataclass(frozen=True)
class DataConfig:
    """Which rollouts are read, and how they become optimizer steps."""

    rollout_data: tuple[str, ...] = ()
    """Rollout files (JSONL, Parquet, .pt), globs or folders."""

    rollout_watch: str | None = None
    """Folder that an engine elsewhere fills during the run, in place of --rollout-data: each file
    (renamed into it when complete) is one rollout, in the order of names; a file named END ends
    the run."""

    rollout_dir: str | None = None
    """Folder that notes which rollouts the run was given; without it "rollouts" in --save."""

    max_staleness: int | None = None
    """Leave out samples whose weight_version is older than the trained weights by more optimizer
    steps than this."""

    num_epochs: int = 1
    """Passes over the rollout files."""

    rollout_batch_size: int | None = None
    """Prompts per rollout; without it those of --num-steps-per-rollout steps of
    --global-batch-size samples, and without that a whole epoch."""

    n_samples_per_prompt: int | None = None
    """Responses per prompt in the rollout files, as batches are reckoned; prompts that have another
    number are reported and trained all the same."""

    num_rollout: int | None = None
    """Rollouts at most; without it all that the epochs, or the watched folder, give."""

    num_steps_per_rollout: int | None = None
    """Optimizer steps per rollout; where --global-batch-size is not given it is the samples of a
    rollout / this."""

    global_batch_size: int | None = None
    """Samples per optimizer step; without it and --num-steps-per-rollout a rollout is one step."""

    micro_batch_size: int = 1
    """Samples per micro-batch; not used with --use-dynamic-batch-size."""

    use_dynamic_batch_size: bool = False
    """Pack micro-batches by tokens instead of by count."""

    max_tokens_per_gpu: int | None = None
    """Most tokens of a micro-batch on one rank (a pack holds this times the context parallel
    size)."""

    shuffle: bool = True
    """Shuffle prompt groups each epoch, seeded by --seed."""

    reward_key: str | None = None
    """Where `reward` is a dict: the entry that is trained on."""

    rollout_top_p: float = 1.0
    """top-p at which the rollouts were sampled; below 1 the kept ids of each row are replayed."""

    truncate_samples: bool = False
    """Cut a sample that is longer than --max-position-embeddings, or than the tokens of a pack, at
    the end of its response; without it such a sample is a bad row."""

    bad_rows: Literal["error", "skip"] = "error"
    """A bad row ends the run, or is counted, left out, and written aside into --tensorboard-dir or
    --save."""

    trust_pickle: bool = False
    """Unpickle .pt rollout dumps in full; only for files whose origin you trust."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Number of steps, learning rate and weight decay schedules (all counted in steps)."""

    train_iters: int | None = None
    """Optimizer steps at most; without it as many as the rollouts give."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    """Learning rate decay function."""

    lr_decay_iters: int | None = None
    """Steps over which the learning rate decays; without it all steps of the run."""

    lr_warmup_iters: int = 0
    """Steps of linear warmup."""

    lr_warmup_fraction: float | None = None
    """Linear warmup as a share of the decay steps, in [0, 1)."""

    lr_warmup_init: float = 0.0
    """Learning rate at which warmup starts."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """WSD: shape of the annealing phase."""

    lr_wsd_decay_iters: int | None = None
    """WSD: steps of the annealing phase."""

    start_weight_decay: float | None = None
    """Weight decay at the first step; without it --weight-decay."""

    end_weight_decay: float | None = None
    """Weight decay at the last step; without it --weight-decay."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from its start to its end value."""

    override_opt_param_scheduler: bool = False
    """On --load, take learning rate and weight decay schedules from the flags, not from the
    checkpoint."""

    use_checkpoint_opt_param_scheduler: bool = False
    """On --load, take learning rate and weight decay schedules from the checkpoint, not from
    the flags."""

    max_skipped_steps: int = 10
    """End the run after this many skipped (non-finite) steps in all."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, loading, and when to stop."""

    save: str | None = None
    """Directory for checkpoints."""

    save_interval: int | None = None
    """Steps between checkpoints; without it only the last step is saved."""

    save_retain_interval: int | None = None
    """Keep only checkpoints whose step is a multiple of this, and the newest."""

    save_keep_last: int | None = None
    """Keep only this many of the newest checkpoints, beside what --save-retain-interval keeps."""

    async_save: bool = False
    """Go on training while the files of a checkpoint are written."""

    load: str | None = None
    """Directory to continue from."""

    pretrained_checkpoint: str | None = None
    """Directory of an earlier run's checkpoints: initial weights of a run that --load does not
    continue."""

    finetune: bool = False
    """Load weights only and start at step 0, with a new optimizer, schedule and data order."""

    no_load_optim: bool = False
    """Load no optimizer and schedule state."""

    no_load_rng: bool = False
    """Load no random number generator state."""

    no_save_optim: bool = False
    """Save no optimizer and schedule state."""

    no_save_rng: bool = False
    """Save no random number generator state."""

    exit_on_missing_checkpoint: bool = False
    """Refuse to start from scratch when --load holds no checkpoint."""

    exit_interval: int | None = None
    """Save and end at the first step that is a multiple of this."""

    exit_duration_in_mins: float | None = None
    """Save and end after this many minutes."""


@dataclass(frozen=True)
class LoggingConfig:
    """What is reported, where, and how often."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard events, metrics.jsonl and config.yaml."""

    log_interval: int = 1
    """Steps between console lines."""


@dataclass(frozen=True)
class RuntimeConfig:
    """The process: device, seed, timeout, configuration file."""

    config: str | None = None
    """YAML file that may hold any flag; the command line wins over it."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train; auto is cuda where a driver is found."""

    seed: int = 1234
    """Seed of initialization, dropout and data order."""

    distributed_timeout_minutes: float = 10.0
    """Minutes that a rank may wait for another, 0.5 being 30 seconds: in a collective, and without
    a new phase or micro-batch. The job then ends and names the rank."""

    fp64: bool = False
    """Compute everything in float64, where parallel layouts differ by nothing that rounding could
    explain; slow, to compare them."""

    dry_run: bool = False
    """Check flags and rollout files, print the layout, and stop."""


@dataclass(frozen=True)
class RunConfig:
    """One run, resolved and checked: made by `megatron.rl.arguments.parse_config`."""

    transformer: TransformerConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    model: ModelConfig
    data: DataConfig
    engine: EngineConfig
    advantage: AdvantageConfig
    loss: PolicyLossConfig
    value_loss: ValueLossConfig
    aggregation: AggregationConfig
    head: HeadConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    runtime: RuntimeConfig
    world_size: int
    """Ranks of the job."""
    device_type: Literal["cuda", "cpu"]
    """What --device means on this machine."""
    flags: Mapping[str, Any]
    """Every flag's value, before megatron-core derives its own."""
    origins: Mapping[str, str]
    """Where each value that is not the default comes from."""
    notes: tuple[str, ...]
    """Flags that have no effect, and what megatron-core warns of."""

    @property
    def replays_kept_ids(self) -> bool:
        """Whether every row has the ids that its tokens could be, and probabilities are theirs."""
        if self.engine.rollout_engine is None:
            return self.data.rollout_top_p < 1
        return self.data.rollout_top_p < 1 or self.engine.rollout_top_k > 0

    @cached_property
    def layout(self) -> DerivedLayout:
        """Ranks, vocabulary and batches that follow from the flags and the world size."""
        return DerivedLayout.of(self)

    @property
    def is_critic(self) -> bool:
        """Whether the model in training gives values, and no distribution over tokens."""
        return self.loss.loss_type == "value_loss"

    def to_yaml(self) -> str:
        """Every flag with its value; as the file of `--config` it gives this run again."""
        return self._yaml

    @cached_property
    def _yaml(self) -> str:
        values = {
            name: written(value)
            for name, value in self.flags.items()
            if name not in ("config", "dry_run")
        }
        return yaml.safe_dump(values, sort_keys=False)

    def describe(self) -> str:
        """The flags that are not defaults and where they come from, notes, and the layout."""
        rows = [
            (name, str(written(self.flags[name])), origin) for name, origin in self.origins.items()
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [
            f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows
        ]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "", *notes, *([""] if notes else []), self.layout.describe()])
