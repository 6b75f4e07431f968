"""How a forward pass is launched. Knows tensors, not requests."""

from .eager_runner import EagerRunner, ForwardModel

__all__ = ["EagerRunner", "ForwardModel"]
