"""The story model that comes with bilens: trained, rounded to eight bits, and measured.

No figure of the papers. `bilens.load("story")` is what this recipe trains: the preset `story`, four
bilinear layers on TinyStories. `python -m experiments.story RUN` writes the finished run of a
training in eight bits to the package.

Measured is the model as it ships, on the validation stories of its training, lower-cased as its
tokenizer lower-cases them: bits a character, with half a context before each token but the first
ones. Both files of TinyStories are read and validation stories are drawn from all, so those of the
file `valid` would not do: 19 of 20 are in training. The same program measures the weights before
they were rounded, and, with their capitals, stories260K of llama2.c, a transformer of 260,000
weights, which may have been trained on them.

For ten verbs and ten nouns the strongest token before and after each is read from the weights. It
fits if the two tokens follow each other in the stories more than twice as often as by chance.

Ten behaviours, two templates each, are in `story.tsv`: how many of the questions the model answers,
and the circuit of each, measured on questions that did not find it.

Small and paper: the same, a training of an hour and a quarter on one core that knows bfloat16.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from math import log
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch
from torch.nn import functional

import bilens
from bilens import load
from bilens.circuits import Stages, circuit
from bilens.convert import open_model, open_tokenizer, save_model
from bilens.data import Corpus, clean, read_texts
from bilens.flows import answered, read_pairs
from bilens.language import read_ngrams
from bilens.train import PRESETS
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.llama2c import stories260K
from experiments.results import Row

N_STORIES, LEAST = 200, 3
"""Held-out stories, and questions of a template that are needed for stages."""
STORY = Path(bilens.__file__).parent / "story"
QUESTIONS = Path(__file__).with_suffix(".tsv")
ABOUT = (
    "The model of English stories that comes with bilens, trained on TinyStories (Eldan and Li "
    "2023; CDLA-Sharing-1.0). Its weights are stored in eight bits: bilens opens it, and saves it "
    "as an ordinary checkpoint, which plain transformers cannot."
)
"""The first paragraph of its card."""
VERBS = ("ate", "ran", "saw", "jumped", "climbed", "played", "gave", "found", "asked", "went")
NOUNS = ("girl", "dog", "ball", "tree", "mom", "cake", "park", "bird", "boat", "friend")


def run(context: RecipeContext) -> Outcome:
    """Train, and measure what ships."""
    preset = PRESETS["story"]
    trained = context.language("tinystories", preset.training, preset.model)
    shipped: Any = load("story")
    size = (STORY / "model.safetensors").stat().st_size / 2**20
    rows = [
        bits_row(context, shipped, {"before rounding to eight bits": trained}),
        Row("size of the weights", size, unit="MiB"),
        fitting_row(context, shipped),
    ]
    rows += [pronouns(shipped), *behaviours(shipped)]
    return Outcome({row.claim: row.value for row in rows}, rows=rows)


def stories_of(context: RecipeContext) -> Iterator[str]:
    """Yield the stories of both files of TinyStories, cleaned as in training."""
    return map(clean, read_texts("tinystories", context.data_dir))


def held_out_stories(context: RecipeContext) -> Iterator[str]:
    """Yield the validation stories of the preset `story`, cleaned, with their capitals."""
    sizes = PRESETS["story"].model
    corpus = context.corpus("tinystories", sizes.n_ctx, sizes.vocab_size)
    with_capitals = {spelling(story): story for story in stories_of(context)}
    for text in validation_texts(corpus):
        yield with_capitals[spelling(text)]


def spelling(text: str) -> str:
    """Return the letters and digits of a text, which tokens spell alike but for their case."""
    return "".join(filter(str.isalnum, text.lower()))


def validation_texts(corpus: Corpus) -> Iterator[str]:
    """Yield the texts that are whole in the rows of the validation split, as tokens spell them."""
    tokenizer: Any = corpus.tokenizer
    text: list[int] = []
    for row in corpus.validation:
        for token in row["input_ids"].tolist():
            if token == tokenizer.bos_token_id:
                text = []
            elif token == tokenizer.eos_token_id:
                yield tokenizer.decode(text)
            else:
                text.append(token)


def bits_row(context: RecipeContext, model: ResidualModel, beside: dict[str, ResidualModel]) -> Row:
    """Return the bits a character of a model, of those beside it, and of stories260K."""
    held_out = list(islice(held_out_stories(context), N_STORIES))
    lower = [text.lower() for text in held_out]
    reference: Any = load(stories260K(context))
    baselines = {
        **{name: mean(bits_per_character(other, lower)) for name, other in beside.items()},
        "stories260K, with capitals": mean(bits_per_character(reference, held_out)),
    }
    claim = "bits a character of held-out stories, in lower case"
    return Row.of(claim, bits_per_character(model, lower), unit="bits", baselines=baselines)


def fitting_row(context: RecipeContext, model: ResidualModel) -> Row:
    """Return the share of words whose strongest tokens fit, beside that of random tokens."""
    fits, random_fits = fitting(model, stories_of(context))
    return Row.of_share(
        "share of verbs and nouns whose strongest token before and after fit",
        fits,
        baselines={"random tokens": mean(random_fits)},
    )


def pronouns(model: ResidualModel) -> Row:
    """Return what stages restore on a template that did not find them."""
    (found,) = circuit(model, read_pairs(model, "pronouns")).circuits
    left_out = [one.measured.restored.value for one in found.left_out.values()]
    return Row.of_range("restored on a template left out, pronouns, median and range", left_out)


def behaviours(model: ResidualModel) -> list[Row]:
    """Return what the stages of each behaviour restore, on questions that did not find them.

    Beside it stand what is left without them, the share of the model's parts and places that are
    in them, and the share of all questions that the model answers. A template of which it answers
    fewer than three is left out.
    """
    questions = read_pairs(model, QUESTIONS)
    known = Counter((x.task, x.template) for x in answered(model, questions))
    asked = Counter(x.task for x in questions)
    rows = []
    kept = [x for x in questions if known[x.task, x.template] >= LEAST]
    for answer in circuit(model, kept).answers:
        found, measured = answer.circuit, answer.circuit.measured
        assert isinstance(found, Stages)
        inside, every = found.inside
        right = sum(n for (task, _), n in known.items() if task == found.task)
        row = Row(
            f"{found.task}: change restored",
            measured.restored.value,
            measured.restored.low,
            measured.restored.high,
            measured.questions,
            baselines={
                "left": measured.left.value,
                "inside": inside / every,
                "answered": right / asked[found.task],
            },
        )
        rows.append(row)
    return rows


@torch.no_grad()
def bits_per_character(model: ResidualModel, stories: list[str]) -> list[float]:
    """Return the loss of a model on each story in bits, over the number of its characters.

    Each window has the first token, and predicts what follows its middle: at most as many tokens as
    in training, and at least half as many before each, but at the beginning of a story.
    """
    tokenizer: Any = model.tokenizer
    n_ctx = min(256, model.model.config.max_position_embeddings)
    bits = []
    for story in stories:
        nats = 0.0
        pieces = tokenizer.encode(story, add_special_tokens=False)
        ids = torch.tensor([[tokenizer.bos_token_id, *pieces]])
        half = (n_ctx - 1) // 2
        for start in range(1, ids.shape[1], half):
            first = max(1, start - half)
            window = torch.cat([ids[:, :1], ids[:, first : start + half]], dim=1)
            n_new = min(half, ids.shape[1] - start)
            logits = model.logits(window)[0, -n_new - 1 : -1]
            nats += float(functional.cross_entropy(logits, window[0, -n_new:], reduction="sum"))
        bits.append(nats / log(2) / len(story))
    return bits


def fitting(model: ResidualModel, stories: Iterable[str]) -> tuple[list[bool], list[bool]]:
    """Return which strongest tokens before and after the words follow each other in stories.

    Then the same for random tokens in their place, drawn by their frequency.
    """
    tokenizer: Any = model.tokenizer
    single: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for story in stories:
        tokens = tokenizer.tokenize(story)
        single.update(tokens)
        pairs.update(pairwise(tokens))
    total = single.total()

    def follows(first: str, second: str) -> bool:
        expected = single[first] * single[second] / total
        return pairs[first, second] > max(1.0, 2 * expected)

    words = [*VERBS, *NOUNS]
    readings = [read_ngrams(model, word, layer=0) for word in words]
    strongest = [(one.preceding["token"][0], one.following["token"][0]) for one in readings]
    draws = Random(0).choices(list(single), [*single.values()], k=2 * len(words))
    random = list(zip(draws[::2], draws[1::2], strict=True))
    found = [
        [
            follows(before, word) and follows(word, after)
            for word, (before, after) in zip(words, of, strict=True)
        ]
        for of in (strongest, random)
    ]
    return found[0], found[1]


def ship(run: Path, folder: Path = STORY) -> None:
    """Write a finished training to the package, in eight bits."""
    model = open_model(run)
    save_model(folder, model, open_tokenizer(run, model), eight_bits=True)
    card = folder / "README.md"
    text = card.read_text("utf-8")
    card.write_text(text.replace(f"# {run.name}\n", f"# story\n\n{ABOUT}\n", 1), "utf-8")


if __name__ == "__main__":
    ship(Path(sys.argv[1]))
