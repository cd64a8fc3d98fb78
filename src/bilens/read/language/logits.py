"""One prediction, split exactly: every path to the logits, and every pair of them in the MLP."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import NotBilinearError
from bilens.nn.language import LanguageModel
from bilens.read.language.stream import read_stream

__all__ = ["LogitTerms", "split_logits"]


@dataclass(frozen=True, eq=False)
class LogitTerms:
    """The logits of the next token as a sum over paths.

    With sources p_a of what the MLP reads (the token itself, each head, biases),

        logits = sum_a W_U p_a + sum_ab W_U B(p_a, p_b)

    Attributes:
        sources: names of the p_a.
        residual: W_U p_a, what each source says past the MLP.
        pairs: W_U B(p_a, p_b), symmetric in a and b.
    """

    sources: tuple[str, ...]
    residual: Float[Tensor, "sources vocab"]
    pairs: Float[Tensor, "sources sources vocab"]

    def total(self) -> Float[Tensor, " vocab"]:
        """The model's logits."""
        return self.residual.sum(0) + self.pairs.sum((0, 1))


@torch.no_grad()
def split_logits(model: LanguageModel, ids: Int[Tensor, " time"], position: int = -1) -> LogitTerms:
    """Split the logits at one position of a text by path.

    At the first position all heads look at the one token there is, so that for it the split needs
    no pattern and follows from the weights alone.

    Args:
        model: of one block without norms, mixes and cap.
        ids: the text.
        position: counted from the end if negative.

    Raises:
        NotBilinearError: the model has several blocks, a norm, a mix, a cap, or an MLP that is no
            tensor.
        BilensError: the text has no such position.

    Source:
        Pearce et al. 2024, section 6.1; Elhage et al. 2021 for the paths around the MLP.
    """
    if len(model.blocks) > 1 or model.config.obstacles:
        raise NotBilinearError(
            f"The model has {len(model.blocks)} blocks and "
            f"{', '.join(model.config.obstacles) or 'no norm'}; its logits are a sum over paths "
            "for one block without norms, mixes and cap"
        )
    tensor = model.mlp(0).tensor("blocks[0].mlp")
    stream = read_stream(model, ids, position % len(ids) if position < 0 else position)
    heads = stream.heads.sum(1)
    names = ["direct", *(f"head {h}" for h in range(len(heads)))]
    sources = torch.cat([stream.direct[None], heads])
    if model.config.bias or tensor.constant:
        names.append("bias")
        sources = torch.cat([sources, stream.constant[None]])
    read = sources
    if tensor.constant:
        one = torch.zeros(len(sources), 1, dtype=sources.dtype, device=sources.device)
        one[-1] = 1
        read = torch.cat([sources, one], 1)
    left, right = read @ tensor.left.T, read @ tensor.right.T
    hidden = (left[:, None] * right[None] + left[None] * right[:, None]) / 2
    return LogitTerms(
        sources=tuple(names),
        residual=sources @ model.W_U,
        pairs=hidden @ tensor.out.T @ model.W_U,
    )
