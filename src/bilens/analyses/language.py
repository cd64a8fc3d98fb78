"""Analyses of language models: their options, and calls of what computes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from bilens.analyses import refusals
from bilens.analyses.refusals import ABLATED, SHOWN
from bilens.analysis import Reading, analysis
from bilens.lazy_imports import lazy_import
from bilens.options import Keep, Level, Positional, Target, layer_of, token_list
from bilens.settings import Between, Count, Index, NotNegative, Seed

if TYPE_CHECKING:
    from bilens import data, transformer
else:  # Types in quotes, which help does not wait for.
    data, transformer = lazy_import("bilens.data"), lazy_import("bilens.transformer")


@analysis("flow", check=refusals.of_flow)
def flow(
    model: "transformer.ResidualModel",
    corpus: "data.Corpus | None" = None,
    *,
    prompt: str,
    token: str = "",
    minus: str = "",
    against: str | None = None,
    mean: bool = False,
    replace: str = "",
    target: Target = "logit",
    shown: Count = SHOWN,
    ablate: Index = ABLATED,
    answer: str = "",
    generate: Index = 0,
) -> Reading:
    """Split the change of a logit between two texts exactly over the parts of a model.

    Without a second text it is the neutral one: all tokens but the first have the mean embedding of
    the vocabulary.

        bilens flow runs/grammar --prompt "then ben ate" --token rice --minus soup
        bilens flow model.gguf --prompt "The keys to the cabinet" --token " are" --replace keys=key

    Args:
        model: Any, with its tokenizer.
        corpus: Texts whose mean embedding `mean` takes.
        prompt: The text; the logit that is split is of the token after it.
        token: The answer that is predicted; or several tokens, separated by commas. By default the
            likeliest after the prompt, minus that in a second run or the second likeliest.
        minus: Tokens whose mean is subtracted, separated by commas; one with a comma in double
            quotes.
        against: A second text, best of as many tokens; the change of the logit between both is
            split. Of several of as many tokens, separated by |, the mean embedding is taken.
        mean: The second run has the mean embedding at each position, of the texts or else of the
            vocabulary.
        replace: Words of the prompt and their replacements in a second text, as keys=key,was=is.
        target: The logit, the log-probability or the probability.
        shown: Number of the strongest nodes that pages and JSON have.
        ablate: Measure this many of the strongest nodes: the change of each is exchanged in the
            running model, in both directions.
        answer: A text that follows; each of its tokens, by its log-probability, is split over the
            tokens before it.
        generate: Let the model write the answer: this many tokens at most, the likeliest each time.
    """
    from bilens.data.corpus import first_texts
    from bilens.flows.answers import answer_flows
    from bilens.flows.fitted import likely_answer
    from bilens.flows.question import Question, second_run
    from bilens.flows.reading import answer_question

    texts = [] if corpus is None else list(first_texts(corpus))
    second, other = second_run(
        model, prompt, against=against, mean=mean, replace=replace, texts=texts
    )
    if answer or generate:
        each = target if target != "logit" else "log-probability"
        return answer_flows(
            model, prompt, answer or None, against=second, generate=generate or 1, target=each
        )
    names, others = token_list(token), token_list(minus)
    if not names:
        likely = likely_answer(model, prompt, second)
        names, others = (likely.token,), others or tuple(likely.minus)
    return answer_question(
        model,
        Question(prompt, names, others, second, target=target),
        other,
        shown=shown,
        ablate=ablate,
    )


@analysis("lens")
def lens(
    model: "transformer.ResidualModel",
    *,
    prompt: str,
    against: str | None = None,
    layers: Count = 8,
    k: Annotated[int, Between(1, 20)] = 3,
) -> Reading:
    """Carry the change of the stream forward to all logits, exactly, layer by layer.

        bilens lens model.gguf --prompt "The keys to the cabinet" --against "The key to the cabinet"

    Args:
        model: Any, with its tokenizer.
        prompt: The text.
        against: A second text of as many tokens; by default the neutral one, all of whose tokens
            but the first have the mean embedding of the vocabulary.
        layers: Most layers that are shown, evenly spaced; a larger number shows all.
        k: Most tokens that a cell is said to raise, and to lower.
    """
    from bilens.flows import read_lens
    from bilens.flows.question import NEUTRAL

    return read_lens(model, prompt, against or NEUTRAL, layers=layers, k=k)


@analysis("diff", check=refusals.of_diff)
def diff(
    model: "transformer.ResidualModel",
    *,
    tuned: Positional,
    prompt: str = "",
    token: str = "",
    minus: str = "",
    against: str = "",
    target: Target = "logit",
    questions: str = "",
    undo: tuple[Count, ...] = (),
    orders: Index = 0,
) -> Reading:
    """Split the change of an answer by tuning, exactly over the weights that differ.

        bilens diff base tuned --prompt "The capital of France is" --token " Paris" --minus " Rome"
        bilens diff base tuned --questions questions.tsv --undo 10

    Args:
        model: The model before tuning.
        tuned: The model after, of the same architecture, or a folder with an adapter of LoRA.
        prompt: The text.
        token: The answer; or several tokens, separated by commas.
        minus: Tokens whose mean is subtracted, separated by commas.
        against: A second text for the base model, of as many tokens; by default the prompt.
        target: The logit, the log-probability or the probability.
        questions: File with a line for each question, its columns separated by tabs: the text, the
            token, tokens to subtract (separated by commas) and the second text; or as a header
            says; or the name of a task that comes with bilens. Each weight's share has an interval.
        undo: Numbers of the strongest weights, such as 5 20; what is lost without them is measured.
        orders: Number of random orders from which the Shapley value of each layer is measured.
    """
    from dataclasses import replace as with_fields

    from bilens.flows import diff as split
    from bilens.flows import diffs
    from bilens.flows.tuning import DiffReading

    answer, others = token_list(token), token_list(minus)
    reading: DiffReading
    if questions:
        reading = diffs(model, tuned, questions)
    else:
        second = against or None
        reading = split(model, tuned, prompt, answer, others, against=second, target=target)
    return with_fields(
        reading,
        undone=tuple(reading.undo(k) for k in undo),
        shapley=reading.measure(orders) if orders else {},
    )


@analysis("circuit", check=refusals.of_circuit)
def circuit(
    model: "transformer.ResidualModel",
    prompt: str = "",
    token: str = "",
    *,
    minus: str = "",
    against: str = "",
    questions: str = "",
    level: Level = "stages",
    keep: Keep = 0.95,
    size: Count | None = None,
    heads: bool = False,
    controls: bool = False,
) -> Reading:
    """Find what carries the answer to a question, in a few stages, and measure it on others.

        bilens circuit model.gguf --questions agreement.tsv
        bilens circuit model.gguf --questions agreement.tsv --level parts --heads --size 5
        bilens circuit runs/grammar --prompt "then ben ate" --token rice --against "then lily ate"

    A stage is the heads, or the MLPs, of a range of layers at the word where the texts differ, at
    their end, or between. Of a file with several templates each is left out once, and what the
    others find is measured on it. The answer of each of several tasks is measured on the questions
    of all.

    Args:
        model: Any, with its tokenizer.
        prompt: The first text, of one question.
        token: The answer that is predicted after it; or several tokens, separated by commas.
        minus: Tokens whose mean logit is subtracted, separated by commas; one with a comma in
            double quotes.
        against: The second text, of as many tokens.
        questions: File with a line for each question, its columns separated by tabs: the text, the
            token, tokens to subtract (both separated by commas), the second text and, with several
            of them, the names of its task and template; or as a header says, a first line with
            their names, text, token, minus, against, task and template. Or a .jsonl file, in each
            line an object with these names, or the name of a task that comes with bilens, such as
            agreement. Some questions of a template find, the others
            measure.
        level: Stages, or parts: the heads and MLPs of a circuit one by one, of a single question
            at positions.
        keep: Least share of the change that parts keep on the questions that decide their number.
        size: Number of parts; by default the smallest that keeps enough.
        heads: Of parts only heads, with all MLPs in place.
        controls: Also search for an answer of two words that no question has, and say whether it
            is told apart.
    """
    from bilens import circuits
    from bilens.flows import Question, read_pairs

    pairs = (
        read_pairs(model, questions, any_length=True)
        if questions
        else [Question(prompt, token_list(token), token_list(minus), against)]
    )
    return circuits.circuit(
        model, pairs, level=level, keep=keep, size=size, heads=heads, controls=controls
    )


@analysis("task-directions")
def task_directions(
    model: "transformer.ResidualModel", *, questions: str, k: Count = 8, strongest: Count = 20
) -> Reading:
    """Find the directions of MLPs that recur in the flows of a task, and measure them.

        bilens task-directions model.gguf --questions agreement.tsv

    Args:
        model: Any, with its tokenizer.
        questions: File with a line for each question, its columns separated by tabs: the text, the
            token, tokens to subtract (separated by commas), the second text and, with several
            tasks, the name of its task; or as a header says, a first line with their names, text,
            token, minus, against and task. Or the name of a task that comes with bilens, such as
            agreement. The first half of a task's questions find, the others measure.
        k: Directions of each MLP.
        strongest: Number of directions that are exchanged between both texts and named.
    """
    from bilens import circuits
    from bilens.flows import read_pairs

    pairs = read_pairs(model, questions)
    return circuits.task_directions(model, pairs, k, strongest=strongest)


@analysis("contexts", check=refusals.of_tokens)
def contexts(
    model: "transformer.ResidualModel",
    corpus: "data.Corpus",
    *,
    token: str,
    layer: Index | None = None,
    minus: str = "",
    eigenvectors: Index = 4,
    k: Count = 8,
) -> Reading:
    """Find the eigenvectors of an output, and the validation texts in which they are active.

        bilens contexts runs/grammar --token soup --layer 0

    Args:
        model: the model, whose MLP in the layer is bilinear.
        corpus: texts in the model's tokens.
        token: the output token.
        layer: number of the layer, from 0; models of one layer do not need it.
        minus: tokens whose mean is subtracted from the output, separated by commas; one with a
            comma in double quotes.
        eigenvectors: number of eigenvectors of either sign.
        k: number of texts for each eigenvector.
    """
    from bilens.language import read_direction

    return read_direction(
        model,
        corpus,
        token,
        layer=layer_of(model, layer),
        minus=token_list(minus),
        eigenvectors=eigenvectors,
        k=k,
    )


@analysis("ngrams", check=refusals.of_tokens)
def ngrams(
    model: "transformer.ResidualModel",
    *,
    token: str,
    layer: Index | None = None,
    minus: str = "",
    k: Count = 20,
    position: Index | None = None,
    among: Count | None = None,
) -> Reading:
    """Find the tokens before and after a token, and skip-trigrams of each head, from the weights.

    Tokens to subtract count in skip-trigrams only, which need a bilinear MLP.

        bilens ngrams runs/grammar --token soup

    Args:
        model: the model.
        token: the token.
        layer: number of the layer whose heads and MLP count, from 0; models of one layer do not
            need it.
        minus: tokens whose mean is subtracted from the output, separated by commas; one with a
            comma in double quotes.
        k: number of rows of each table.
        position: position of the tokens, required by models with learned positions.
        among: only this many tokens, the first of the vocabulary, which are often the frequent
            ones; all pairs of 50,000 tokens take a minute a head.
    """
    from bilens.language import read_ngrams

    return read_ngrams(
        model,
        token,
        layer=layer_of(model, layer),
        minus=token_list(minus),
        k=k,
        position=position,
        among=_first_tokens(model, among),
    )


@analysis("heads")
def heads(
    model: "transformer.ResidualModel",
    *,
    layer: Index | None = None,
    heads: Sequence[Index] | None = None,
    k: Count = 10,
    components: Index = 2,
    distance: Index = 1,
    position: Index | None = None,
    among: Count | None = None,
) -> Reading:
    """Find the tokens that heads of a layer attend to, and the outputs that they raise.

        bilens heads runs/grammar --k 5

    Args:
        model: the model.
        layer: number of the layer, from 0; models of one layer do not need it.
        heads: numbers of the heads; all by default.
        k: number of pairs of each kind.
        components: number of singular components.
        distance: distance from the query back to the key, in tokens.
        position: position of the query, required by models with learned positions.
        among: only this many tokens, the first of the vocabulary, which are often the frequent
            ones; all pairs of 50,000 tokens take a minute a head.
    """
    from bilens.language import read_attention

    return read_attention(
        model,
        layer=layer_of(model, layer),
        heads=heads,
        k=k,
        components=components,
        distance=distance,
        position=position,
        among=_first_tokens(model, among),
    )


@analysis("composition")
def composition(model: "transformer.ResidualModel") -> Reading:
    """Compute how much of each component's output later ones read, with a random baseline.

    The score is |W R|_F / (|W|_F |R|_F) for every writer W and every later reader R: Elhage et al.
    2021. If either is rotated at random, its mean square is exactly 1 / d_model.

        bilens composition HuggingFaceTB/SmolLM2-135M --json
    """
    from bilens.language import composition_scores

    return composition_scores(model)


@analysis("summary", check=refusals.of_summary)
def summary(
    model: "transformer.ResidualModel",
    corpus: "data.Corpus",
    *,
    prompt: str = "",
    token: str | None = None,
    minus: str = "",
    n_tokens: Count | None = None,
) -> Reading:
    """Measure a language model's loss, and split a logit of a held-out text over its parts.

    The loss is in nats a token and in bits a character and byte, as the tokenizer writes the text.
    Beside it are a unigram, the frequencies of the same tokens, and the last loss of its training.

    The text is the one whose next token the model predicts with the largest margin.

        bilens summary runs/grammar --prompt "then ben ate"

    Args:
        model: the model.
        corpus: texts in the model's tokens.
        prompt: a text; by default the beginning of a held-out one.
        token: the token whose logit is split; by default the next token, minus the most likely
            other one.
        minus: tokens whose mean is subtracted from it, separated by commas; one with a comma in
            double quotes.
        n_tokens: number of tokens of the validation texts that the loss is measured on; by default
            as many as leave it a standard error of 1 %.
    """
    from bilens.flows.summary import read_summary
    from bilens.language import TokenDirection
    from bilens.train.run_directory import last_loss

    direction = None if token is None else TokenDirection(token, token_list(minus))
    loss = last_loss(model.source)
    return read_summary(model, corpus, prompt, direction, n_tokens=n_tokens, training_loss=loss)


@analysis("generate")
def generate(
    model: "transformer.ResidualModel",
    *,
    prompt: str = "once upon a time",
    tokens: Count = 120,
    temperature: NotNegative = 0.7,
    seed: Seed = 0,
) -> Reading:
    """Let a language model continue a text.

        bilens generate runs/grammar --prompt "then ben" --tokens 20

    Args:
        model: the model.
        prompt: Beginning of the text.
        tokens: number of tokens to add, at most.
        temperature: 0 takes the most likely token, 1 draws from the model's probabilities.
        seed: seed of the sampling.
    """
    from bilens.language import generate_text
    from bilens.language.contexts import Continuation

    return Continuation(
        generate_text(model, prompt, tokens=tokens, temperature=temperature, seed=seed)
    )


def _first_tokens(
    model: "transformer.ResidualModel", among: int | Sequence[int] | None
) -> Sequence[int] | None:
    # The explorer gives the tokens themselves, the frequent ones of its texts.
    return range(min(among, model.vocab_size)) if isinstance(among, int) else among
