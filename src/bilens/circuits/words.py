"""The words of a vocabulary: which are written alike, and which mean alike."""

import torch
from jaxtyping import Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.language.names import token_names, token_text
from bilens.transformer import ResidualModel

FRAME = frozenset(
    """
    a an and are as at be been but by for from had has have he her his i if in into is it its my
    not of on or our she so than that the their them then there these they this those to us very
    was we were what when which while who will with would you your
    """.split()  # noqa: SIM905
)
"""Words that hold an English sentence together; they stay as they are."""


class Words:
    """The words of a model's vocabulary: tokens of letters, and how alike two of them are."""

    def __init__(self, model: ResidualModel) -> None:
        self.texts = [token_text(name) for name in token_names(model, range(model.vocab_size))]
        # A token that begins with no letter and no digit ends the word before it.
        # Where no token holds a space, each is a word.
        spaced = any(text.startswith(" ") for text in self.texts)
        ends = [not (spaced and text[:1].isalnum()) for text in self.texts]
        self.ends_word = torch.tensor(ends).float()
        # Further words with capitals go on with a name.
        goes_on = [form(text) == (True, True) for text in self.texts]
        self.ends_name = self.ends_word * (1 - torch.tensor(goes_on).float())
        self.by_form: dict[tuple[bool, bool], list[int]] = {}
        for number, text in enumerate(self.texts):
            if self.is_word(number) and text.strip().lower() not in FRAME:
                self.by_form.setdefault(form(text), []).append(number)
        if not self.by_form:
            raise BilensError("the model's vocabulary has no words, expected a tokenizer of words")
        # Without the mean and the two strongest directions, which frequent words share.
        # Source: Mu and Viswanath 2018, "All-but-the-top".
        words = torch.tensor([n for numbers in self.by_form.values() for n in numbers])
        W = model.W_E.float().cpu()
        centre = W[words].mean(0)
        _, directions = torch.linalg.eigh((W[words] - centre).T @ (W[words] - centre))
        W = W - centre
        W = W - (W @ directions[:, -2:]) @ directions[:, -2:].T
        self.embeddings = torch.nn.functional.normalize(W, dim=1)

    def is_word(self, number: int) -> bool:
        """Return whether a token is a word of two letters or digits or more, a letter first."""
        text = self.texts[number].removeprefix(" ")
        return len(text) > 1 and text[:1].isalpha() and text.isalnum()

    def is_content(self, number: int) -> bool:
        """Return whether a token is a word that does more than hold a sentence together."""
        return self.is_word(number) and self.texts[number].strip().lower() not in FRAME

    def like(self, number: int) -> Int[Tensor, " n"]:
        """Return the words of content that are written as one: behind a space, with a capital."""
        return torch.tensor(self.by_form.get(form(self.texts[number]), []), dtype=torch.long)


def form(text: str) -> tuple[bool, bool]:
    """Return whether a word stands behind a space, and whether it begins with a capital."""
    return text.startswith(" "), text.strip()[:1].isupper()
