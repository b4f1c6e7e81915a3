"""The step protocol: what the training loop around the model does, as far as memory depends on it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProtocol:
    """What is resident when, in the training loop that runs the plan.

    Attributes:
        gradients_resident: `.grad` of every trainable parameter exists when the forward begins.
        outputs_held: the caller keeps the model's outputs through backward and the optimizer step.
        forwards_outstanding: at most so many forwards whose backward has not run, this one included.
        gradient_outputs: output tensors that receive a gradient: "auto", "all", or their positions. "auto":
            with a `loss_fn` those that it uses; else the one called loss, the 0-dimensional ones, or all
            that require one, whichever there are.
        other_bytes: bytes on the device that belong to nothing the plan knows of.
    """

    gradients_resident: bool = False
    """`.grad` of every trainable parameter exists when the forward begins: gradients are accumulated
    over several backwards, or cleared only between forward and backward."""
    outputs_held: bool = True
    """The caller keeps the model's outputs through backward and the optimizer step."""
    forwards_outstanding: int = 1
    """Number of forwards whose backward has not run, this one included, at most."""
    gradient_outputs: str | tuple[int, ...] = "auto"
    """Output tensors that receive a gradient: "auto" (those that `loss_fn` uses; without one, the
    one called loss, else the 0-dimensional ones, else all), "all", or their positions."""
    other_bytes: int = 0
    """Bytes on the device that belong to nothing the plan knows of."""
