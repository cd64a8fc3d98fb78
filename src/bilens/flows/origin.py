"""Where a flow comes from: the pass of its model, whose graph is made again when it is needed."""

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ref

from torch import nn

from bilens.errors import BilensError
from bilens.flows.adjoints import Adjoints


class Origin:
    """The pass of some questions, which takes far more memory than their flows.

    Of all passes only the one that was used last keeps its graph. Neither graph nor model is
    written by pickle; a copy shares both.

    Args:
        model: the module that runs.
        run: a function that runs it under rules.
    """

    _latest: "ClassVar[Callable[[], Origin | None]]" = staticmethod(lambda: None)

    def __init__(self, model: nn.Module, run: Callable[[], Adjoints]) -> None:
        self.model: nn.Module | None = model
        self._run: Callable[[], Adjoints] | None = run
        self._adjoints: Adjoints | None = None

    def adjoints(self) -> Adjoints:
        """Return the pass with its graph, which runs again if it was released.

        Raises:
            BilensError: the flow was read from a file, or the model computes another number now.
        """
        result = self._adjoints
        if result is None:
            if self._run is None:
                raise BilensError(
                    "the flow was written by pickle, without its model, which edges and outputs of "
                    "nodes need; read it from the model again, by bilens.flow"
                )
            result = self._run()
            if result.keep:
                # One walk fills in the adjoints, before other threads can see the pass.
                deque(result.layers(), maxlen=0)
        latest = Origin._latest()
        if latest is not None and latest is not self:
            latest.release()
        self._adjoints, Origin._latest = result, ref(self)
        return result

    def release(self) -> None:
        """Forget the graph."""
        self._adjoints = None

    def __deepcopy__(self, _: Any) -> "Origin":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"model": None, "_run": None, "_adjoints": None}
