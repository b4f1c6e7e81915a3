"""Pictures and files of a training step's memory; each reads a `StepReport`, none needs torch."""
