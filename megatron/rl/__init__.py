"""RL post-training through megatron-core: this repository's part of the megatron namespace."""

import warnings

# said at every import and save: which optional accelerators are absent, and what torch will rename
for _speaker in (r"megatron\.core\.", r"torch\.distributed\.", r"torch\.jit\."):
    warnings.filterwarnings("ignore", module=_speaker)
