"""A model that several visitors run at once."""

import threading

from bilens.read.flow.editing import sharing_weights
from bilens.residual import ResidualModel

__all__ = ["ThreadModel"]


class ThreadModel(threading.local):
    """A model for each thread: modules of its own, which share their weights.

    Reading a run sets hooks on modules, and removing a part of it changes what they give, which
    must not be seen by others who run them at that moment.

    Args:
        model: any.

    Attributes:
        own: the model, for the thread that asks.
    """

    # Python calls this anew in each thread that looks.
    def __init__(self, model: ResidualModel) -> None:
        self.own = sharing_weights(model)
