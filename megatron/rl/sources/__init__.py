"""Where samples come from: files that are there, or a folder that an engine fills.

What ranks do together is in `folder` and `spooled`, not imported here: a check needs no torch.
"""

from megatron.rl.sources.check import ReadOptions, check_rollouts
from megatron.rl.sources.files import FileSource, RolloutFiles, RolloutRows
from megatron.rl.sources.source import EndOfRolloutsError, Source
from megatron.rl.sources.spool import Spool, SpoolError

__all__ = [
    "EndOfRolloutsError",
    "FileSource",
    "ReadOptions",
    "RolloutFiles",
    "RolloutRows",
    "Source",
    "Spool",
    "SpoolError",
    "check_rollouts",
]
