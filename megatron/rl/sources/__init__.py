"""Where samples come from. So far: files."""

from megatron.rl.sources.file_source import FileSource, steps_of
from megatron.rl.sources.files import ReadOptions, RolloutFiles, check_rollouts

__all__ = ["FileSource", "ReadOptions", "RolloutFiles", "check_rollouts", "steps_of"]
