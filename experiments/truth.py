"""Ground truth: attributions of edges in models whose circuits are known.

Three kinds of models have a known circuit.

- RASP programs that tracr compiled to weights (`experiments/compiled.py` writes the files, in an
  environment of its own). An edge is in the circuit if its reader's weights see coordinates that
  its part writes. The part must also depend on the tokens, and the reader's output must be used.
- Induction: transformers of two layers with MLPs, trained here on random sequences that repeat.
  Their patterns show which heads attend to the token before, and which copy, attending to the
  token after the same one. The circuit has the edges from the embedding to values of both and to
  queries of heads that copy. Further edges lead from the former to keys of the latter, and from
  there to the logits.
- Chains of Boolean operations, written by hand: each MLP joins what the one before it found with
  one more input. Cross-layer transcoders rewrite such a chain as a sum of shallow steps. For each
  input that changes, the circuit is the chain from the first MLP that reads it.

Programs and chains also have the circuit of parts and the edges between them that
`bilens.flows` finds, of which nothing is lost (f 0.999): how many are found, and how many of
these are in the program.

For each model the score of an edge is the mean |attribution| over pairs of texts. The area under
the ROC curve (AUROC) is the chance that an edge of the circuit has a larger score than another one.
In compiled models other edges have scores of 0, so it shows how many edges a method misses.

Left out is modular addition: every part of a model of one layer that learns it is in its circuit.

Small and paper are the same: 16 pairs, and 3 initialisations of the induction model, 3 minutes.

Source: Gupta et al. 2024 (arXiv 2407.14494) for the measure; Olsson et al. 2022 for induction;
Lange et al. 2026 (openreview 8sE1yCPnbR) for the rewriting of chains.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor
from torch.nn import functional

from bilens import load
from bilens.analysis import Table
from bilens.circuits import Cases, EdgeCases, EdgeGraph, search_circuit
from bilens.convert import save_model
from bilens.errors import BilensError
from bilens.flows import Question
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.transformer import Pass, ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.edges import AttributedEdges, attributed_edges
from experiments.results import Row

PAIRS, OURS = 16, "contrastive flow"
SEEDS = (3, 3)
"""Initialisations at either scale."""
WHOLE, LINKS = 0.999, 4
ROUNDING = 1e-6
"""Scores below this share of the largest count as 0."""
LEAST_ATTENTION = 0.4
"""Least mean attention to the expected position, of a head of the induction circuit."""
N_TOKENS, PERIOD, STEPS = 48, (6, 16), 2000


def run(context: RecipeContext) -> Outcome:
    """Measure compiled programs and induction models."""
    rows = [
        {"model": path.stem, **compiled(path)}
        for path in sorted((context.models / "compiled").glob("*.safetensors"))
    ]
    rows += [chain(changed) for changed in range(LINKS + 1)]
    rows += [induction(seed, context.models) for seed in context.seed_range(SEEDS)]
    frame = pd.DataFrame(rows)
    settings = {"questions": PAIRS, "low and high": "range over models"}
    return Outcome(
        {"models": rows},
        parts=[Table(frame, "AUROC of edges")],
        rows=_rows(rows),
        settings=settings,
    )


def _rows(models: list[dict[str, Any]]) -> list[Row]:
    """Return how much of each kind of circuit is found, and the AUROC of its edges."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for model in models:
        kind = model["model"].partition(",")[0]
        name = kind if kind in ("chain", "induction") else "compiled programs"
        kinds.setdefault(name, []).append(model)
    rows = []
    for kind, of_kind in kinds.items():
        if "parts found" in of_kind[0]:
            known, found, both = (
                sum(model[part] + model[edge] for model in of_kind)
                for part, edge in (
                    ("parts", "circuit"),
                    ("parts found", "edges found"),
                    ("parts in both", "edges in both"),
                )
            )
            rows.append(
                Row(
                    f"{kind}: share of the known parts and edges that are found",
                    both / known,
                    n=len(of_kind),
                    baselines={"share of those found that are known": both / found},
                )
            )
        methods = [name for name in of_kind[0] if isinstance(of_kind[0][name], float)]
        areas_of = {name: [model[name] for model in of_kind] for name in methods}
        ours, others = areas_of.pop(OURS), areas_of
        means = {name: fmean(values) for name, values in others.items()}
        rows.append(
            Row(f"{kind}: AUROC of edges by {OURS}", fmean(ours), min(ours), max(ours), len(ours),
                baselines=means)
        )  # fmt: skip
    return rows


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Return the chance that a positive has a larger score than a negative, equal ones half."""
    inside, outside = scores[positive], scores[~positive]
    larger = stats.mannwhitneyu(inside, outside).statistic
    return float(larger / (len(inside) * len(outside)))


def areas(graph: AttributedEdges, circuit: Tensor, asked: list[Question]) -> dict[str, Any]:
    """Return the AUROC of each attribution, given a circuit and questions."""
    total: dict[str, Tensor] = {}
    for question in asked:
        for name, values in attributed_edges(graph, question).items():
            total[name] = total.get(name, 0) + values.abs() / len(asked)
    generator = torch.Generator().manual_seed(0)
    total["random"] = torch.rand(circuit.shape, generator=generator, dtype=torch.float64)
    exists = graph.exists
    result: dict[str, Any] = {"edges": int(exists.sum()), "circuit": int(circuit[exists].sum())}
    for name, scores in total.items():
        above = scores.where(scores > ROUNDING * scores.max(), torch.zeros_like(scores))
        result[name] = auroc(above[exists], circuit[exists])
    return result


# Compiled programs.


def compiled(path: Path) -> dict[str, Any]:
    """Return the AUROC of each attribution on a compiled program."""
    model, about = compiled_model(path)
    graph = AttributedEdges(model)
    labels = about["labels"]
    outputs = [i for i, name in enumerate(labels) if _is_output(name)]
    generator = torch.Generator().manual_seed(0)
    asked: list[Question] = []
    while len(asked) < PAIRS:
        drawn = torch.tensor(about["tokens"])[
            torch.randint(len(about["tokens"]), (2, 6), generator=generator)
        ]
        ids = functional.pad(drawn, (1, 0), value=about["first"])
        streams = [Pass.of(model, text).stream[0, -1, outputs] for text in ids]
        change = streams[0] - streams[1]
        if float(change.abs().max()) < 1e-3:
            continue
        u = torch.zeros(model.d_model, dtype=torch.float64)
        # Of one number any change counts, of several outputs those of other tokens.
        u[outputs] = change.sign() * (change.abs() > (0.5 if len(outputs) > 1 else 0))
        asked.append(Question.of(ids[0], u, against=ids[1]))
    circuit = compiled_circuit(graph, outputs, about["tokens"])
    return {**areas(graph, circuit, asked), **found(graph, circuit, asked)}


def found(graph: EdgeGraph, circuit: Tensor, asked: list[Question]) -> dict[str, int]:
    """Return numbers of parts and edges of a program, of those found, and of those in both."""
    cases = Cases.of(graph.model, asked)
    sizes = range(1, int(cases.everything.sum()) + 1)
    parts = search_circuit([cases], cases, WHOLE, sizes=sizes).mask
    of_edges, between = EdgeCases(cases), graph.between(parts)
    sizes = range(1, int(between.sum()) + 1)
    edges = search_circuit([of_edges], of_edges, WHOLE, between, sizes).mask
    # The embedding is the first source; the others are in the order of masks.
    program, parts = circuit.any(0)[1:], parts.flatten()
    return {
        "parts": int(program.sum()),
        "parts found": int(parts.sum()),
        "parts in both": int((parts & program).sum()),
        "edges found": int(edges.sum()),
        "edges in both": int((edges & circuit).sum()),
    }


def _is_output(name: str) -> bool:
    start, _, _ = name.partition(":")
    return start.startswith("output_") and start.removeprefix("output_").isdigit()


def compiled_model(path: Path) -> tuple[ResidualModel, dict[str, Any]]:
    """Return a compiled program as a model of bilens, and the notes of its file."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
    weights = load_file(path)
    heads, key, width = about["heads"], about["key_size"], len(about["labels"])
    # A head has d_model / n_heads coordinates here, so that both sizes are padded with zeros.
    d_head = max(key, -(-width // heads))
    tokens, positions = (weights[f"{name}_embed/embeddings"] for name in ("token", "pos"))
    config = LanguageConfig(
        vocab_size=len(tokens),
        d_model=heads * d_head,
        n_layers=about["layers"],
        n_heads=heads,
        d_hidden=about["hidden"],
        n_ctx=len(positions),
        mlp="relu",
        positions="learned",
        attention_scale=key**-0.5,
        bias=True,
    )
    model, state = _empty(config)

    def put(name: str, value: Tensor) -> None:
        state[name][tuple(slice(size) for size in value.shape)] = value

    def by_head(value: Tensor) -> Tensor:
        split = value.unflatten(-1, (heads, key))
        return functional.pad(split, (0, d_head - key)).flatten(-2)

    put("embed.weight", tokens)
    put("pos_embed.weight", positions)
    for layer in range(about["layers"]):
        block, source = f"blocks.{layer}", f"transformer/layer_{layer}"
        for name in ("query", "key", "value"):
            put(f"{block}.attn.{name}.weight", by_head(weights[f"{source}/attn/{name}/w"]).T)
            put(f"{block}.attn.{name}.bias", by_head(weights[f"{source}/attn/{name}/b"]))
        put(f"{block}.attn.out.weight", by_head(weights[f"{source}/attn/linear/w"].T))
        put(f"{block}.attn.out.bias", weights[f"{source}/attn/linear/b"])
        for name, number in (("inner", 1), ("out", 2)):
            put(f"{block}.mlp.{name}.weight", weights[f"{source}/mlp/linear_{number}/w"].T)
            put(f"{block}.mlp.{name}.bias", weights[f"{source}/mlp/linear_{number}/b"])
    model.load_state_dict(state)
    view = ResidualModel(model.requires_grad_(False))
    for ids, output in zip(weights["ids"], weights["outputs"], strict=True):
        if not torch.allclose(Pass.of(view, ids).stream[0, :, :width], output, atol=1e-4):
            raise BilensError(f"{path} computes something else here than where it was compiled")
    return view, about


def _empty(config: LanguageConfig) -> tuple[LanguageModel, dict[str, Tensor]]:
    """Return a model, and the weights to write into it, all zero."""
    model = LanguageModel(config).double()
    return model, {name: torch.zeros_like(value) for name, value in model.state_dict().items()}


def compiled_circuit(graph: EdgeGraph, outputs: list[int], tokens: list[int]) -> Tensor:
    """Return the edges of a compiled program, (readers, parts), from its weights."""
    model = graph.model
    embedded = model.W_E[tokens]
    # The columns are directions that each part can change, depending on the tokens.
    writes = [(embedded - embedded.mean(0)).T]
    owners = [0]
    for layer in model.modules.layers:
        out = layer.heads.out.weight().unflatten(1, (model.n_heads, -1))
        value = layer.heads.value.weight().unflatten(0, (model.n_heads, -1))
        writes += [out[:, head] @ value[head] for head in range(model.n_heads)]
        writes.append(layer.mlp.down.weight())
        owners += range(len(owners), len(owners) + model.n_heads + 1)
    reads = [_read_rows(reader) for reader in graph.readers[:-1]]
    reads.append(torch.eye(model.d_model, dtype=torch.float64)[outputs])
    joined = torch.tensor([[bool((r @ w).abs().max() > ROUNDING) for w in writes] for r in reads])
    joined &= graph.exists
    owner = reader_parts(graph)
    varies = torch.zeros(graph.n_sources, dtype=torch.bool)
    varies[0] = True
    used = torch.zeros(len(graph.readers), dtype=torch.bool)
    used[-1] = True
    for _ in range(graph.n_sources):
        changed = (joined & varies).any(1)
        for reader, part in enumerate(owner[:-1]):
            varies[part] |= changed[reader]
        read = joined[used].any(0)
        used[:-1] = read[torch.tensor(owner[:-1])]
    return joined & used[:, None] & varies


def _read_rows(reader: Any) -> Tensor:
    return torch.cat([part.weight()[rows] for part, rows in reader.maps])


def reader_parts(graph: EdgeGraph) -> list[int]:
    """Return the part that each reader belongs to, where heads share nothing; -1 for logits."""
    model, owners = graph.model, []
    for layer in range(model.n_layers):
        heads = [graph.source(layer, head) for head in range(model.n_heads)]
        owners += [*heads, *heads, *heads, graph.source(layer, model.n_heads)]
    return [*owners, -1]


# Chains.


def chain(changed: int) -> dict[str, Any]:
    """Return the circuit found on a chain of Boolean operations when one of its inputs changes."""
    model = chain_model()
    graph = AttributedEdges(model)
    u = torch.zeros(model.d_model, dtype=torch.float64)
    u[2 * LINKS] = 1.0
    every = 2 ** (LINKS + 1) - 1
    texts = torch.tensor([every]), torch.tensor([every - 2**changed])
    circuit = torch.zeros_like(graph.exists)
    # The first MLP reads two inputs, each other one a single input.
    first = max(changed - 1, 0)
    reader, source = graph.first_reader(first + 1) - 1, 0
    for layer in range(first, LINKS):
        circuit[reader, source] = True
        source, reader = graph.source(layer, 1), graph.first_reader(layer + 2) - 1
    circuit[-1, source] = True
    asked = [Question.of(texts[0], u, against=texts[1])]
    return {
        "model": f"chain, input {changed}",
        **areas(graph, circuit, asked),
        **found(graph, circuit, asked),
    }


def chain_model() -> ResidualModel:
    """Return a model whose MLPs compute a and b, then that and c, and so on; heads write nothing.

    A token is a number whose bits are the inputs, the first coordinates of the stream. Those after
    them are the results.
    """
    config = LanguageConfig(
        vocab_size=2 ** (LINKS + 1),
        d_model=2 * LINKS + 1,
        n_layers=LINKS,
        n_heads=1,
        d_hidden=1,
        n_ctx=1,
        mlp="relu",
        positions="none",
        bias=True,
    )
    model, state = _empty(config)
    numbers = torch.arange(2 ** (LINKS + 1))
    for bit in range(LINKS + 1):
        state["embed.weight"][:, bit] = (numbers >> bit & 1).double()
    for layer in range(LINKS):
        mlp = f"blocks.{layer}.mlp"
        # 1 if both are 1: relu(before + input - 1).
        state[f"{mlp}.inner.weight"][0, [LINKS + layer if layer else 0, layer + 1]] = 1.0
        state[f"{mlp}.inner.bias"][0] = -1.0
        state[f"{mlp}.out.weight"][LINKS + 1 + layer, 0] = 1.0
    model.load_state_dict(state)
    return ResidualModel(model.requires_grad_(False))


# Induction.


def induction(seed: int, folder: Path) -> dict[str, Any]:
    """Return the AUROC of each attribution on a trained induction model."""
    model = trained_induction(seed, folder / f"induction-{seed}")
    graph = AttributedEdges(model)
    previous, copying = induction_heads(model)
    asked: list[Question] = []
    generator = torch.Generator().manual_seed(1000 + seed)
    while len(asked) < PAIRS:
        n = int(torch.randint(*PERIOD, (1,), generator=generator))
        period = torch.randperm(N_TOKENS, generator=generator)[: n + 1]
        place = 1 + int(torch.randint(n - 2, (1,), generator=generator))
        first = torch.cat([period[:n], period[:place]])
        second = first.clone()
        second[place] = period[n]
        u = model.W_U[:, first[place]] - model.W_U[:, second[place]]
        asked.append(Question.of(first, u, against=second))
    circuit = induction_circuit(graph, previous, copying)
    return {
        "model": f"induction, seed {seed}",
        "heads": f"{_names(graph, previous)} to {_names(graph, copying)}",
        **areas(graph, circuit, asked),
    }


def _names(graph: EdgeGraph, heads: list[tuple[int, int]]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads) or "none"


def repeated(batch: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return texts of a random period that repeats, (batch, 2 periods), and the period."""
    n = int(torch.randint(*PERIOD, (1,), generator=generator))
    period = torch.rand(batch, N_TOKENS, generator=generator).argsort(1)[:, :n]
    return torch.cat([period, period], 1), n


def trained_induction(seed: int, path: Path) -> ResidualModel:
    """Return a model of two layers that continues repeated sequences, trained if missing."""
    if not (path / "model.safetensors").is_file():
        torch.manual_seed(seed)
        config = LanguageConfig(
            vocab_size=N_TOKENS,
            d_model=64,
            n_layers=2,
            n_heads=4,
            d_hidden=64,
            n_ctx=32,
            norm="rms",
            mlp="bilinear",
        )
        language_model = LanguageModel(config)
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(language_model.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
        for _ in range(STEPS):
            ids, n = repeated(64, generator)
            logits = language_model(ids).logits[:, n - 1 : -1]
            # Only the second period can be predicted.
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, n:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        save_model(path, language_model, None)
    model = load(str(path))
    assert isinstance(model, ResidualModel)
    return model


def induction_heads(model: ResidualModel) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return heads that attend to the token before, and those that attend after the same token."""
    ids, n = repeated(PAIRS, torch.Generator().manual_seed(0))
    before = torch.zeros(model.n_layers, model.n_heads)
    after = torch.zeros_like(before)
    for text in ids:
        of_text = Pass.of(model, text, patterns=True)
        for layer in range(model.n_layers):
            pattern = of_text.pattern(layer)[0]
            before[layer] += pattern.diagonal(-1, 1, 2).mean(-1) / len(ids)
            # From t in the second period to t - n + 1.
            after[layer] += pattern.diagonal(1 - n, 1, 2)[:, 1:].mean(-1) / len(ids)
    heads = [(layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)]
    return (
        [place for place in heads if before[place] > LEAST_ATTENTION],
        [place for place in heads if after[place] > LEAST_ATTENTION],
    )


def induction_circuit(
    graph: EdgeGraph, previous: list[tuple[int, int]], copying: list[tuple[int, int]]
) -> Tensor:
    """Return the edges of induction, (readers, parts)."""
    circuit, heads = torch.zeros_like(graph.exists), graph.model.n_heads

    def reader(layer: int, head: int, role: int) -> int:
        return graph.first_reader(layer) + role * heads + head

    queries, keys, values = range(3)
    for layer, head in previous:
        circuit[reader(layer, head, values), 0] = True
    for layer, head in copying:
        circuit[reader(layer, head, queries), 0] = True
        circuit[reader(layer, head, values), 0] = True
        circuit[-1, graph.source(layer, head)] = True
        for below, number in previous:
            if below < layer:
                circuit[reader(layer, head, keys), graph.source(below, number)] = True
    return circuit
