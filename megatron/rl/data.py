"""What a run trains on: rollouts from files, or from a folder that an engine fills."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from megatron.rl.computed import needs_values, old_is_engines
from megatron.rl.config import RunConfig
from megatron.rl.engines import Engine
from megatron.rl.engines.make import make_engine
from megatron.rl.initialize import World
from megatron.rl.logging import log_info, log_warning
from megatron.rl.prompt_files import check_prompts
from megatron.rl.prompt_tasks import TaskPrompts
from megatron.rl.prompts import PromptMaker, PromptSource
from megatron.rl.rewards import RewardPool
from megatron.rl.rollout import num_steps
from megatron.rl.samples import RowRules
from megatron.rl.sources import (
    FileSource,
    ReadOptions,
    RolloutFiles,
    Source,
    Spool,
    check_rollouts,
)
from megatron.rl.sources.folder import WatchedFolder
from megatron.rl.sources.generated import GeneratedRollouts, GenerationConfig
from megatron.rl.sources.spooled import Maker, SpooledSource
from megatron.rl.step import Trainee
from megatron.rl.text import TextTokenizer, build_tokenizer
from megatron.rl.together import on_first_rank


def row_rules(config: RunConfig) -> RowRules:
    """What this run demands of every rollout row."""
    loss, advantage = config.loss, config.advantage
    has_advantages = loss.loss_type != "sft_loss"
    # a function of the user's own takes what there is; a reward that is absent is 0
    estimates = has_advantages and not advantage.is_custom
    compares_prompts = config.aggregation.aggregation == "prompt_mean"
    limits = (config.model.max_position_embeddings, config.layout.tokens_per_pack)
    return RowRules(
        vocab_size=config.model.vocab_size,
        reward_key=config.data.reward_key,
        need_reward=estimates,
        need_group=compares_prompts or (estimates and advantage.compares_groups),
        need_rollout_log_probs=loss.use_tis or loss.use_rs or old_is_engines(config),
        need_ref_log_probs=loss.use_kl_loss or advantage.kl_coef > 0,
        need_values=estimates and needs_values(config),
        need_kept_ids=config.replays_kept_ids,
        max_length=min((limit for limit in limits if limit is not None), default=None),
        truncate=config.data.truncate_samples,
    )


def read_options(config: RunConfig) -> ReadOptions:
    """How rows are read.

    Skipped rows are written aside where the run leaves its files; a dry run writes nothing.
    """
    aside = config.logging.tensorboard_dir or config.checkpoint.save
    if config.runtime.dry_run:
        aside = None
    return ReadOptions(
        bad_rows=config.data.bad_rows,
        bad_rows_path=aside and str(Path(aside) / "bad_rows.jsonl"),
        trust_pickle=config.data.trust_pickle,
    )


def check_data(config: RunConfig) -> RolloutFiles:
    """Check every row of `--rollout-data`; in this process alone."""
    return check_rollouts(config.data.rollout_data, row_rules(config), read_options(config))


def make_source(config: RunConfig, files: RolloutFiles) -> FileSource:
    """The checked files as rollouts.

    Without `--rollout-batch-size` a rollout is the whole prompts that fit into
    `--num-steps-per-rollout` steps, so that none of them is a small remainder.
    """
    data = config.data
    prompts = data.rollout_batch_size
    if prompts is None and data.global_batch_size is not None:
        samples = data.global_batch_size * (data.num_steps_per_rollout or 1)
        prompts = max(samples // (data.n_samples_per_prompt or files.largest_group), 1)
    return FileSource(
        files,
        rollout_batch_size=prompts,
        num_epochs=data.num_epochs,
        seed=config.runtime.seed,
        shuffle=data.shuffle,
        n_samples_per_prompt=data.n_samples_per_prompt,
    )


def watched_source(config: RunConfig) -> SpooledSource:
    """The files of `--rollout-watch`, each a rollout."""
    folder, size = Path(config.data.rollout_watch), config.layout.samples_per_rollout
    return _spooled(config, lambda _: WatchedFolder(folder, size))


def generated_source(config: RunConfig, engine: Engine | None, *, draws: bool) -> SpooledSource:
    """Rollouts that the run makes.

    Args:
        config: the run.
        engine: draws responses; None in a dry run.
        draws: whether this rank does, and so scores them.

    Raises:
        BadRowsError: a prompt breaks a rule.
        ConfigError: tokenizer, task or reward cannot be loaded.
    """
    data, own = config.data, config.engine
    tokenizer = make_tokenizer(config)
    limits = (config.model.max_position_embeddings, config.layout.tokens_per_pack)
    sampling = own.sampling(
        config.head.rollout_temperature,
        data.rollout_top_p,
        min((limit for limit in limits if limit is not None), default=None),
        tokenizer.eos_ids,
    )

    def maker(spool: Spool) -> GeneratedRollouts:
        return GeneratedRollouts(
            prompts=make_prompts(config, tokenizer),
            engine=engine,
            rewards=RewardPool(own.rewards(data.reward_key)) if draws else None,
            tokenizer=tokenizer,
            sampling=sampling,
            config=GenerationConfig(
                rollout_batch_size=data.rollout_batch_size,
                n_samples_per_prompt=data.n_samples_per_prompt,
                dynamic_sampling=own.dynamic_sampling,
                max_draws=own.dynamic_sampling_limit,
                overlong_filtering=own.overlong_filtering,
                overlong_cache_length=own.overlong_cache_len,
            ),
            spool=spool,
            seed=config.runtime.seed,
        )

    return _spooled(config, maker)


def make_tokenizer(config: RunConfig) -> TextTokenizer:
    """The tokenizer of `--tokenizer-model`, or of `--hf-checkpoint`."""
    hf_checkpoint, vocab_size = config.model.hf_checkpoint, config.model.vocab_size
    return build_tokenizer(config.engine.tokenizer(hf_checkpoint, vocab_size))


def make_prompts(config: RunConfig, tokenizer: TextTokenizer) -> PromptSource:
    """The prompts of `--prompt-data` or `--prompt-task`, in the order of the run."""
    own = config.engine
    if own.prompt_task is not None:
        prompts = TaskPrompts(own.task(), PromptMaker(own.prompts(), tokenizer))
    else:
        prompts = check_prompts(own.prompt_data, own.prompts(), tokenizer)
    return PromptSource(prompts, seed=config.runtime.seed, shuffle=config.data.shuffle)


def _spooled(config: RunConfig, make_maker: Callable[[Spool], Maker]) -> SpooledSource:
    data = config.data
    spool = Spool(Path(data.rollout_dir or f"{config.checkpoint.save}/rollouts"))
    return SpooledSource(
        spool,
        make_maker(spool),
        row_rules(config),
        read_options(config),
        num_rollouts=data.num_rollout,
        max_staleness=data.max_staleness,
    )


def open_files(config: RunConfig) -> FileSource:
    """Rank 0 checks all rows of `--rollout-data` and sends the row index to all others.

    Raises:
        BadRowsError: a row breaks a rule.
    """
    return make_source(config, on_first_rank(lambda: check_data(config)))


def open_spooled(config: RunConfig, trainee: Trainee) -> SpooledSource:
    """Rollouts that come during the run; called on every rank.

    Raises:
        BadRowsError: a prompt breaks a rule.
        ConfigError: tokenizer, task or reward cannot be loaded.
        SpoolError: `--rollout-dir` is another run's.
    """
    if config.data.rollout_watch is not None:
        source = watched_source(config)
    else:
        engine, draws = make_engine(config, trainee)
        source = generated_source(config, engine, draws=draws)
    source.open()
    return source


def dry_run(config: RunConfig, world: World) -> None:
    """Check flags and data and say what a run would do; nothing is built or written."""
    if world.rank != 0:
        return
    if config.engine.rollout_engine is not None:
        source = generated_source(config, None, draws=False)
    elif config.data.rollout_watch is not None:
        source = watched_source(config)
    else:
        source = make_source(config, check_data(config))
    announce(config, source, count_steps(source, config))


def announce(config: RunConfig, source: Source, total_steps: int | None) -> None:
    """Print the resolved configuration, the layout and the data, once."""
    steps = "as rollouts come" if total_steps is None else total_steps
    log_info(f"configuration:\n{config.describe()}")
    log_info(f"rollouts:\n{source.describe()}\n{'optimizer steps':<18}{steps}")
    if isinstance(source, FileSource):
        _warn_of_files(config, source)


def _warn_of_files(config: RunConfig, source: FileSource) -> None:
    wanted = config.data.num_rollout
    if wanted is not None and wanted > source.num_rollouts:
        log_warning(f"--num-rollout {wanted}: the epochs give {source.num_rollouts} rollouts")
    scored = int(source.files.rows["has_rollout_log_probs"].sum())
    if 0 < scored < len(source.files) and config.loss.loss_type == "policy_loss":
        log_warning(
            f"rollout_log_probs in {scored} of {len(source.files)} samples: rollouts that lack "
            "some are not compared with the engine (train_rollout_* are left out there)"
        )


def data_identity(config: RunConfig, source: Source) -> dict[str, object]:
    """What the number of a rollout and of a step within it mean."""
    data = config.data
    return {
        **source.identity(),
        "global_batch_size": data.global_batch_size,
        "num_steps_per_rollout": data.num_steps_per_rollout,
        "seed": config.runtime.seed,
    }


def count_steps(source: Source, config: RunConfig) -> int | None:
    """Optimizer steps of the whole run; None where it ends when no further rollout comes."""
    limit = config.schedule.train_iters
    steps = 0
    for size in islice(source.rollout_sizes(), config.data.num_rollout):
        if limit is not None and steps >= limit:
            return limit
        steps += num_steps(size, config.data)
    if steps == 0:
        return limit
    return steps if limit is None else min(steps, limit)
