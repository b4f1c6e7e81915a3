"""Memory-capped activation checkpointing for PyTorch training steps."""

__all__: list[str] = []
