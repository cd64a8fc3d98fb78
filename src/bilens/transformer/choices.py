"""What layers choose, such as experts: noted in a pass, and taken by another one."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bilens.errors import BilensError

CHOOSING = ("topk", "sort", "argmax", "argmin")
"""Operations that return the places of what they choose."""
Exchange = Callable[[int, Tensor], Tensor]
"""A function from the number of a choice in its layer, and the places chosen, to other places."""


class Choosing(TorchFunctionMode):
    """Mode in which choices are seen or exchanged, in the order in which a layer makes them.

    Attributes:
        exchange: for the layer that runs; None outside of layers.
        made: number of choices of this layer so far.
    """

    def __init__(self, exchange: Exchange | None = None) -> None:
        super().__init__()
        self.exchange, self.made = exchange, 0

    def start(self, exchange: Exchange | None) -> None:
        """Begin or end a layer."""
        self.exchange, self.made = exchange, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        if self.exchange is None or name not in CHOOSING:
            return result
        chosen = result if isinstance(result, Tensor) else result[1]
        places, self.made = self.exchange(self.made, chosen), self.made + 1
        if isinstance(result, Tensor):
            return places
        of_topk = name == "topk"
        dim = given.get("dim", args[1 + of_topk] if len(args) > 1 + of_topk else -1)
        return type(result)((args[0].gather(dim, places), places))


def by_text(
    places: Int[Tensor, "rows *shape"], sets: int, texts: int
) -> Int[Tensor, "sets texts time *others"]:
    """Return places with axes of passes side by side, texts and positions, in front."""
    # Some modules take the tokens of all texts as one list.
    joined = len(places) > sets * texts
    return places.unflatten(0, (sets, texts, -1) if joined else (sets, texts))


def taking(choices: Sequence[Int[Tensor, "rows *shape"]], texts: int) -> Callable[..., Tensor]:
    """Return the function to the choices of another pass.

    Raises:
        BilensError: there are none.
    """
    if not choices:
        raise BilensError(
            f"a layer chooses by no operation whose choice can be exchanged: {', '.join(CHOOSING)}"
        )

    def take(own: Int[Tensor, "texts time *others"], number: int) -> Tensor:
        (other,) = by_text(choices[number], 1, texts)
        return other.to(own.device)

    return take
