"""Flags: made from dataclass fields, read, judged, and given to megatron-core."""
