"""What makes rollouts: the model in training itself, or an engine that is asked over HTTP."""

from megatron.rl.engines.engine import Completion, Engine, EngineError, Request, Sampling

__all__ = ["Completion", "Engine", "EngineError", "Request", "Sampling"]
