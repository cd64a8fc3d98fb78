"""`bilens flow`: where a logit comes from on a text, node by node."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bilens.cli.console import Device, ModelName
from bilens.cli.language import direction_of, load_language
from bilens.cli.terminal import out
from bilens.errors import BilensError
from bilens.files import write_json
from bilens.lazy_imports import lazy_import
from bilens.settings import Between, Count, check_settings

if TYPE_CHECKING:
    from bilens.read import flow as flows
    from bilens.read import language
    from bilens.report import flow as pages
    from bilens.report import flow_viewer
else:  # transformers takes seconds to import, and `--help` does without it.
    flows, language = lazy_import("bilens.read.flow"), lazy_import("bilens.read.language")
    pages = lazy_import("bilens.report.flow")
    flow_viewer = lazy_import("bilens.report.flow_viewer")

__all__ = ["FlowCommand"]


@dataclass(frozen=True)
class FlowCommand:
    """Split a logit on a text, or its change between two, exactly over the parts of a model.

    With a second text nothing is frozen, and heads are split into values, queries and keys.
    Prints the strongest ways down from the logit, and writes a page to explore and its numbers
    as JSON.

        bilens flow runs/grammar --prompt "then ben ate" --token rice --minus soup
        bilens flow model.gguf --prompt "The keys to the cabinet" --token " are" --ablate 5
        bilens flow model.gguf --prompt "The keys to the cabinet" --token " are" --replace keys=key

    Attributes:
        model: run directory, folder or name of a model of a known family, .gguf or llama2.c file.
        prompt: the text; the logit that is split is of the token after it.
        token: the token that is predicted, as the tokenizer spells it or as text, " are".
        minus: tokens whose mean is subtracted from it, separated by commas.
        against: a second text of as many tokens; the change of the logit between both is split.
        replace: words of the prompt and their replacements in the second text, as keys=key,was=is.
        target: the logit, or between two texts the log-probability or the probability.
        m: directions of each MLP at each position, at least 2; 0 for all eigenvectors.
        threshold: what carries less than this share of the absolute flow is not split.
        through_patterns: split patterns of bilinear and squared attention too.
        shown: how many of the strongest nodes the page and the JSON have.
        ablate: remove this many of the strongest nodes, one at a time, from the running model, and
            compare.
        output: the page; the JSON stands beside it.
        viewer: folder to also write the graph to in the files that circuit-tracer's viewer reads,
            under the name of the page.
    """

    model: ModelName
    prompt: str
    token: str
    minus: str = ""
    against: str = ""
    replace: str = ""
    target: Literal["logit", "log-probability", "probability"] = "logit"
    m: int = 4
    threshold: float = 1e-4
    through_patterns: bool = False
    shown: Count = 200
    ablate: Annotated[int, Between(0)] = 0
    output: Path = Path("runs") / "flow.html"
    viewer: Path | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Split, print and write."""
        check_settings(self)
        model = load_language(self.model, self.device)
        if model.tokenizer is None:
            raise BilensError(f"{self.model} has no tokenizer beside it, which --prompt needs")
        if not self.prompt:
            raise BilensError("--prompt is empty; give a text to predict the next token of")
        pairs = [pair.partition("=")[::2] for pair in self.replace.split(",") if pair]
        if self.ablate and (self.against or pairs):
            raise BilensError("--ablate removes nodes of one text; leave out --against, --replace")
        direction = direction_of(self.token, self.minus)
        found = flows.flow(
            model,
            self.prompt,
            direction,
            against=self.against or None,
            replace=dict(pairs) if pairs else None,
            target=self.target,
            m=self.m or None,
            threshold=self.threshold,
            through_patterns=self.through_patterns,
        )
        tokens = pages.shown_tokens(model, found.ids)
        data = pages.flow_data(found, tokens, direction=str(direction), k=self.shown)
        out.print(pages.flow_tree(data))
        ablated = []
        if self.ablate:
            order = sorted(range(len(found.nodes)), key=lambda i: -abs(found.nodes[i].flow))
            numbers = [i for i in order if found.nodes[i].is_removable][: self.ablate]
            results = flows.ablate(model, found, numbers)
            nodes = [found.nodes[i] for i in numbers]
            ablated = [
                (node.kind, node.name(tokens), result)
                for node, result in zip(nodes, results, strict=True)
            ]
            data["ablated"] = [
                {"node": name, "predicted": result.predicted, "actual": result.actual}
                for _, name, result in ablated
            ]
        pages.write_flow_page(self.output, data, ablated, title=f"“{self.prompt}”: {direction}")
        numbers_at = self.output.with_suffix(".json")
        record = {"prompt": self.prompt, **data}
        write_json(numbers_at, record)
        if self.viewer is not None:
            likely = found.trace.logits[-1].softmax(-1)[model.token(self.token)]
            slug, probability = self.output.stem, float(likely)
            graph = flow_viewer.viewer_graph(
                data, slug=slug, prompt=self.prompt, probability=probability
            )
            flow_viewer.write_viewer_files(self.viewer, graph)
        out.print(f"page: {self.output}\nnumbers: {numbers_at}")
        return record
