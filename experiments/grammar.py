"""The synthetic grammar: its rules, found in the weights of a model trained on it.

No figure of the papers: a ground truth for their method. A language with known rules
(`bilens.data.Grammar`) trains a one-layer bilinear transformer without norms, and the rules are
searched for in the weights. Measured are the KL divergence from the grammar's true next-token
distribution to the model's, by the rule that decides (a published toy model has 0.001 nats for
bigrams and 0.010 for skip-trigrams, on a grammar of its own), and the shares that are found of

- the 10 known bigrams, through the residual stream and the MLP's diagonal together;
- the 24 known skip-trigrams A ... B -> C, over all texts of two tokens (`pair_trigrams`);
- the 24 pairs of a verb that attends to a name, at a distance of 2 (`attention_pairs`), by the head
  that has the most and by all heads together.

In the flow of each of the 24 objects, on a sentence, the nodes of the rule are the tokens of name
and verb, the heads from verb to name, and the MLP at the verb. Measured are the share on paths
through these alone, and the share of the logit difference that is left without all other nodes.

The unembedding is centred over the vocabulary, which changes no probability. Head by head in logits
(`skip_trigrams`), tokens that never occur together have the largest numbers, and only a tenth to a
quarter of the known skip-trigrams is found.

Small: 3 initialisations of about 2 minutes on one core each. Paper: 10.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import bilens
from bilens.data import DeepGrammar, Grammar, load_corpus
from bilens.flows import Node, remove
from bilens.language import attention_pairs, bigrams, pair_trigrams
from bilens.train import PRESETS
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.results import Row, intervals

SEEDS = (3, 10)
"""Initialisations at either scale."""
KINDS, HELD_OUT = ("bigram", "skip-trigram", "filler"), 1000


def run(context: RecipeContext) -> Outcome:
    """Train on the grammar and look for it in the weights."""
    preset, grammar = PRESETS["grammar"], Grammar()
    corpus = load_corpus("grammar", n_ctx=preset.model.n_ctx)
    ids = corpus.validation[:HELD_OUT]["input_ids"]
    results: list[dict[str, float]] = []
    for seed in context.seed_range(SEEDS):
        model = context.language("grammar", replace(preset.training, seed=seed), preset.model)
        model.model.unembed.weight -= model.W_U.mean(1)
        kl = divergence(model, grammar, ids)
        results.append(
            {
                **{f"kl_{kind}": kl[kind] for kind in KINDS},
                "bigrams_found": found_bigrams(model, grammar),
                "skip_trigrams_found": found_trigrams(model, grammar),
                **found_pairs(model, grammar),
                **rule_in_flows(model, grammar),
            }
        )
    elsewhere = {"kl_bigram": 0.001, "kl_skip-trigram": 0.010}
    claims = {
        "KL where a bigram decides": ("kl_bigram", elsewhere["kl_bigram"]),
        "KL where a skip-trigram decides": ("kl_skip-trigram", elsewhere["kl_skip-trigram"]),
        "share of the known bigrams that are found": ("bigrams_found", None),
        "share of the known skip-trigrams that are found": ("skip_trigrams_found", None),
        "share of pairs of verb and name found by one head": ("pairs_found_by_one_head", None),
        "flow of an object: share on paths through the rule's nodes alone": ("flow_of_rule", None),
        "flow of an object: share left without all other nodes": ("left_by_rule", None),
    }
    rows = [
        # A divergence may be above 1, and parts of a flow cancel.
        (Row.of_shares if "found" in key else Row.of)(
            claim, [result[key] for result in results], source=source
        )
        for claim, (key, source) in claims.items()
    ]
    return Outcome({**intervals(results), "elsewhere": elsewhere}, rows=rows)


@torch.no_grad()
def divergence(
    model: ResidualModel, grammar: Grammar | DeepGrammar, ids: Tensor, kinds: Sequence[str] = KINDS
) -> dict[str, float]:
    """Return the mean KL of truth to model, in nats, by the rule that decides the next token."""
    truth = grammar.next_distribution(ids)
    predicted = model.logits(ids).double().log_softmax(-1)
    kl = (torch.special.xlogy(truth, truth) - truth * predicted).sum(-1)
    return {kind: float(kl[grammar.is_kind(ids, kind)].mean()) for kind in kinds}


def found_bigrams(model: ResidualModel, grammar: Grammar) -> float:
    """Share of the known bigrams among the twice as many most salient ones."""
    known = set(grammar.bigrams)
    frame = bigrams(model, layer=0, k=2 * len(known))
    return len(known & set(zip(frame.input, frame.output, strict=True))) / len(known)


def found_trigrams(model: ResidualModel, grammar: Grammar) -> float:
    """Share of the known skip-trigrams among the twice as many strongest ones."""
    known = set(grammar.skip_trigrams)
    frame = pair_trigrams(model, k=2 * len(known))
    return len(known & set(zip(frame.virtual, frame.direct, frame.output, strict=True))) / len(
        known
    )


def found_pairs(model: ResidualModel, grammar: Grammar) -> dict[str, float]:
    """Share of the known pairs, verb to name, among the twice as many strongest of a head."""
    known = {(verb, name) for name, verb, _ in grammar.skip_trigrams}
    every = attention_pairs(model, range(model.n_heads), layer=0, k=2 * len(known), distance=2)
    heads = [known & set(zip(f.highest["query"], f.highest["key"], strict=True)) for f in every]
    return {
        "pairs_found_by_one_head": max(map(len, heads)) / len(known),
        "pairs_found": len(set().union(*heads)) / len(known),
    }


def rule_in_flows(model: ResidualModel, grammar: Grammar) -> dict[str, float]:
    """Shares of the flows of all objects on the rule's nodes, and of the logits that they keep.

    The logit is that of the object minus that of the object of the next name.
    """
    objects = {(name, verb): word for name, verb, word in grammar.skip_trigrams}
    names = list(dict.fromkeys(name for name, _ in objects))

    def is_of_rule(node: Node, at_name: int, at_verb: int) -> bool:
        if node.kind == "token":
            return node.position in (at_name, at_verb)
        return node.position == at_verb and node.source in (at_name, None)

    value, on_paths, left = 0.0, 0.0, 0.0
    for (name, verb), word in objects.items():
        minus = objects[names[(names.index(name) + 1) % len(names)], verb]
        flow = bilens.flow(model, f"then {name} was happy and {verb}", word, minus=minus)
        places = flow.tokens.index(name), len(flow.tokens) - 1
        nodes = [node for node in flow.nodes if node.is_removable]
        of_rule = [node for node in nodes if is_of_rule(node, *places)]
        others = [node for node in nodes if not is_of_rule(node, *places)]
        value += flow.value
        on_paths += flow.value * flow.graph(of_rule).share_of_logit
        left += flow.value + (remove(model, flow, others).actual if others else 0)
    return {"flow_of_rule": on_paths / value, "left_by_rule": left / value}
