"""Every text: what the strongest skip-trigrams of one layer of attention prove of all texts.

Of attention without softmax, norm and MLP, the difference of two logits after a last word is a sum
over the other places, each of a table of words by distances. So its range over *all* texts is a sum
of largest and least entries, and is attained. A list of the strongest entries has the error of half
the range of all others, on every text; the answer is proved wherever the list's difference is
larger than that.
"""

import re
from collections import Counter
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from bilens.data import read_texts
from bilens.kernels import bilinear_attention
from experiments.context import RecipeContext
from experiments.results import Row

WORDS, PLACES, WIDTH, HEADS = SIZES = 1024, 32, 96, 4
CHARACTERS, HELD_OUT = 6_000_000, 60_000
STEPS, BATCH, RATE = 2500, 48, 3e-3
SCALE = 0.1
"""Factor of each score. With 1 / d_head, products of two scores are learned far later."""
LISTED = (30, 300, 3000)
"""Skip-trigrams that are listed, of the table's 1,024 words at 31 distances."""
AFTER = {
    "to": ("play", "go"),
    "the": ("girl", "boy"),
    "was": ("happy", "sad"),
    "and": ("said", "ran"),
    "a": ("big", "little"),
    "she": ("was", "had"),
}
"""Two answers after a last word."""


class OneLayer(nn.Module):
    """Embedding, bilinear attention with rotary positions, and unembedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unembed = nn.Linear(WIDTH, WORDS)
        for weight in self.parameters():
            nn.init.normal_(weight, std=WIDTH**-0.5)
        nn.init.zeros_(self.unembed.bias)

    def stream(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time width"]:
        """Return what the unembedding reads."""
        x: Tensor = self.embed(ids)
        heads = [m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in self.maps]
        q1, k1, q2, k2 = map(turned, heads[:4])
        mixed = bilinear_attention(q1, k1, heads[4], q2, k2, scale=SCALE**2)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time words"]:
        logits: Tensor = self.unembed(self.stream(ids))
        return logits


def turned(x: Float[Tensor, "batch heads time width"]) -> Float[Tensor, "batch heads time width"]:
    """Return queries or keys turned by their positions, each pair (i, i + width / 2) of a head."""
    first, second = x.chunk(2, -1)
    speeds = 10_000 ** -torch.linspace(0, 1, first.shape[-1] + 1)[:-1]
    angles = (torch.arange(x.shape[2])[:, None] * speeds).to(x)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def text_rows(context: RecipeContext) -> list[Row]:
    """Train a model and return how far a list of skip-trigrams decides over all texts."""
    train, held_out, numbers = words(context)
    model = trained(train)
    texts = held_out[: len(held_out) // PLACES * PLACES].view(-1, PLACES)
    with torch.no_grad():
        loss = functional.cross_entropy(model(texts)[:, :-1].flatten(0, 1), texts[:, 1:].flatten())
    counts = torch.full((WORDS, WORDS), 0.01).double()
    pairs = train[:-1], train[1:]
    counts.index_put_(pairs, torch.ones(len(train) - 1).double(), accumulate=True)
    bigram = (counts / counts.sum(1, keepdim=True)).log()
    of_bigram = -bigram[texts[:, :-1], texts[:, 1:]].mean()
    rows = [
        Row(
            "texts: loss of one layer of attention",
            float(loss),
            unit="nats a word",
            baselines={"bigrams of the same words": float(of_bigram)},
        )
    ]
    shares: dict[int, list[float]] = {count: [] for count in LISTED}
    errors: dict[int, list[float]] = {count: [] for count in LISTED}
    for last, (first, second) in AFTER.items():
        table = Table.of(model, numbers[last], numbers[first], numbers[second])
        at = (held_out[PLACES - 1 :] == numbers[last]).nonzero().flatten()[:2000]
        before = torch.stack([held_out[i : i + PLACES - 1] for i in at.tolist()])
        difference = table.on(before)
        check = torch.cat([before[:100], torch.full_like(before[:100, :1], numbers[last])], 1)
        logits = model(check)[:, -1]
        own = logits[:, numbers[first]] - logits[:, numbers[second]]
        torch.testing.assert_close(difference[:100], own, rtol=1e-9, atol=1e-9)
        low, high = table.range()
        claim = f'texts: "{first}" minus "{second}" after "{last}", mean and range over all texts'
        beside = {
            "standard deviation on real texts": float(difference.std()),
            "least on real texts": float(difference.min()),
            "largest on real texts": float(difference.max()),
        }
        mean = float(difference.mean())
        rows.append(Row(claim, mean, low, high, len(at), "logits", beside))
        for count in LISTED:
            listed, error = table.listed(count)
            answers = listed.on(before)
            # The bound is of every text, so also of these.
            assert float((difference - answers).abs().max()) <= error + 1e-9
            shares[count].append(float((answers.abs() > error).double().mean()))
            errors[count].append(error)
    for count in LISTED:
        claim = f"texts: answers that {count} skip-trigrams prove for every text, by pair of words"
        beside = {"error on some text, median": float(torch.tensor(errors[count]).median())}
        rows.append(Row.of_range(claim, shares[count], baselines=beside))
    return rows


def words(context: RecipeContext) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Return the most frequent words of stories as numbers, to train and held out, and names."""
    found = list[str]()
    length = 0
    for story in read_texts("tinystories", context.data_dir):
        found += re.findall(r"[a-z']+|[.,!?\"]", story.lower())
        length += len(story)
        if length > CHARACTERS:
            break
    names = ["<unknown>", *(word for word, _ in Counter(found).most_common(WORDS - 1))]
    numbers = {word: number for number, word in enumerate(names)}
    ids = torch.tensor([numbers.get(word, 0) for word in found])
    return ids[:-HELD_OUT], ids[-HELD_OUT:], numbers


def trained(train: Int[Tensor, " time"]) -> OneLayer:
    """Return a model trained on the words, in double precision."""
    torch.manual_seed(0)
    model = OneLayer()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=STEPS, pct_start=0.04, anneal_strategy="linear"
    )
    for _ in tqdm(range(STEPS), desc="one layer of attention", mininterval=10):
        at = torch.randint(0, len(train) - PLACES, (BATCH, 1)) + torch.arange(PLACES + 1)
        ids = train[at]
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.double().requires_grad_(False)


class Table(NamedTuple):
    """A difference of logits after a last word: a constant, and a number of each other place.

    Attributes:
        constant: of the last word alone.
        entries: of each word at each place before it.
    """

    constant: float
    entries: Float[Tensor, "words places"]

    @classmethod
    @torch.no_grad()
    def of(cls, model: OneLayer, last: int, first: int, second: int) -> "Table":
        """Read the table off texts that differ from one text at a single place."""
        text = torch.zeros(PLACES, dtype=torch.long)
        text[-1] = last

        direction = model.unembed.weight[first] - model.unembed.weight[second]
        bias = model.unembed.bias[first] - model.unembed.bias[second]

        def difference(ids: Tensor) -> Tensor:
            return model.stream(ids)[:, -1] @ direction + bias

        base, columns = difference(text[None]), []
        for place in range(PLACES - 1):
            changed = text.repeat(WORDS, 1)
            changed[:, place] = torch.arange(WORDS)
            columns.append(difference(changed) - base)
        return cls(float(base), torch.stack(columns, 1))

    def on(self, before: Int[Tensor, "texts places"]) -> Float[Tensor, " texts"]:
        """Return the difference on texts, given the words before the last."""
        return self.constant + self.entries[before, torch.arange(PLACES - 1)].sum(1)

    def range(self) -> tuple[float, float]:
        """Return the least and the largest difference over all texts."""
        least, largest = (x.values.sum() for x in (self.entries.min(0), self.entries.max(0)))
        return self.constant + float(least), self.constant + float(largest)

    def listed(self, count: int) -> tuple["Table", float]:
        """Return the table with its strongest entries only, and its error over all texts.

        All other entries of a place are the middle of their range.
        """
        centred = self.entries - self.entries.mean(0)
        kept = torch.zeros(centred.numel(), dtype=torch.bool)
        kept[centred.abs().flatten().topk(count).indices] = True
        kept = kept.view_as(centred)
        low = self.entries.masked_fill(kept, torch.inf).amin(0)
        high = self.entries.masked_fill(kept, -torch.inf).amax(0)
        middle = ((low + high) / 2).expand_as(self.entries)
        error = float((high - low).sum() / 2)
        return Table(self.constant, torch.where(kept, self.entries, middle)), error
