"""A view that runs its model for several visitors at once."""

import threading

from bilens.read.flow.editing import sharing_weights
from bilens.residual import ResidualModel

__all__ = ["RunsModel"]


class RunsModel:
    """What runs a model: each thread has modules of its own, which share their weights.

    Reading a run sets hooks on modules, and removing a part of it changes what they give, which
    must not be seen by others who run them at that moment.

    Args:
        model: any.
    """

    def __init__(self, model: ResidualModel) -> None:
        self._own = _Own(model)

    @property
    def model(self) -> ResidualModel:
        """The model, for this thread."""
        return self._own.model


class _Own(threading.local):
    # Called anew in each thread that looks.
    def __init__(self, model: ResidualModel) -> None:
        self.model = sharing_weights(model)
