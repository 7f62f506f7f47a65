"""Where samples come from: files that are there, or a folder that an engine fills."""

from megatron.rl.sources.check import ReadOptions, check_rollouts
from megatron.rl.sources.files import FileSource, RolloutFiles, RolloutRows
from megatron.rl.sources.folder import WatchedFolder
from megatron.rl.sources.source import EndOfRolloutsError, Source
from megatron.rl.sources.spool import Spool, SpoolError
from megatron.rl.sources.spooled import SpooledSource

__all__ = [
    "EndOfRolloutsError",
    "FileSource",
    "ReadOptions",
    "RolloutFiles",
    "RolloutRows",
    "Source",
    "Spool",
    "SpoolError",
    "SpooledSource",
    "WatchedFolder",
    "check_rollouts",
]
