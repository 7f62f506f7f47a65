"""Where samples come from. So far: files."""

from megatron.rl.sources.check import ReadOptions, check_rollouts
from megatron.rl.sources.files import FileSource, RolloutFiles

__all__ = ["FileSource", "ReadOptions", "RolloutFiles", "check_rollouts"]
