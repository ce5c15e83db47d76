"""Integrations work on one process."""

from autograd_hacks.errors import ON_PROCESSES
from autograd_hacks.verbs.grads import PerSampleGrads


def check_alone(grads: PerSampleGrads, what: str, instead: str) -> None:
    """Raises NotImplementedError where processes share the batch, or a layer.  instead: what to do then"""
    if grads.spread.mesh is not None or grads.spread.cuts:
        raise NotImplementedError(
            f"{what}: the model shares its batches, or its layers, with other processes, and this would add up "
            f"those of one process alone. {instead}" + ON_PROCESSES
        )
