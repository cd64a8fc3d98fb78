"""Graphs of flows in files, which are opened, shown, and continued with nodes that are pinned."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.errors import BilensError, CheckpointError
from bilens.files import read_json_object, write_json
from bilens.flows.graph import DRAWN, height
from bilens.flows.nodes import Node, node_columns
from bilens.flows.reading import FlowPage, PageNode
from bilens.sections import Columns, Fact
from bilens.settings import read_settings

PAGE_KEY = "flow"
"""Name of the page of a flow among the settings of an attribution graph."""


@dataclass(frozen=True, eq=False, repr=False)
class SavedGraph(Reading):
    """The graph of a flow from a file, and the nodes that are pinned.

    Attributes:
        page: the strongest nodes of the flow and their edges.
        prompt: the text.
        pinned: addresses of nodes, such as head.26.0@4; without any, the strongest are shown.
        content: the file, an attribution graph.
    """

    page: FlowPage
    prompt: str
    pinned: tuple[str, ...]
    content: Mapping[str, Any] = field(repr=False)

    axes: ClassVar[dict[str, str]] = {"x": "node", "y": "flow"}
    formats: ClassVar[dict[str, str]] = dict.fromkeys(("flow", "measured effect"), "+#.3g")
    is_picture: ClassVar[bool] = True

    @property
    def title(self) -> str:
        """What is asked, and the text."""
        return f"What changes {self.page.metric} after “{self.prompt}”?"

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in the file: the logit, then the largest |flow| first."""
        nodes = []
        for one in self.page.nodes:
            values = {name: getattr(one, name) for name in (x.name for x in fields(Node))}
            of_lists = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}
            nodes.append(Node(**values | of_lists))
        return tuple(nodes)

    @property
    def shown(self) -> list[int]:
        """Numbers of the nodes that are shown: the logit, and those above before those below."""
        numbers = [i for i, node in enumerate(self.nodes) if node.address in self.pinned]
        some = numbers or range(1, min(len(self.nodes), DRAWN + 1))
        return [0, *sorted(some, key=lambda i: height(self.nodes[i]), reverse=True)]

    @property
    def edges(self) -> Float[Tensor, "n n"]:
        """Flow between the nodes that are shown: row a, column b is that from b up to a."""
        edges = torch.zeros(len(self.nodes), len(self.nodes), dtype=torch.float64)
        for a, b, through in self.page.edges:
            edges[a, b] = through
        return edges[self.shown][:, self.shown]

    @checked
    def pin(self, *addresses: str) -> "SavedGraph":
        """Return the graph with further nodes that are pinned, all of those at each address.

        Raises:
            BilensError: the file has no node at an address.
        """
        places = dict.fromkeys(node.address for node in self.nodes[1:])
        for address in addresses:
            if address not in places:
                raise BilensError(
                    f"pin={address!r} is no node of the graph; expected one such as "
                    f"{', '.join([*places][:5])}, or save more nodes by --shown"
                )
        return replace(self, pinned=tuple(dict.fromkeys((*self.pinned, *addresses))))

    def save(self, path: str | Path) -> None:
        """Write the graph with its pins, as an attribution graph for Neuronpedia."""
        pins = [
            entry["node_id"]
            for entry, node in zip(self.content["nodes"], self.nodes, strict=True)
            if node.address in self.pinned
        ]
        params = {**self.content["qParams"], "pinnedIds": pins}
        write_json(Path(path), {**self.content, "qParams": params})

    def facts(self) -> list[Fact]:
        return [
            (f"change of {self.page.metric}", self.page.value),
            ("nodes in the file", len(self.nodes) - 1),
            ("pinned", ", ".join(self.pinned) or "none"),
        ]

    def columns(self) -> Columns:
        """Return the nodes that are shown, the largest |flow| first."""
        nodes = [self.nodes[i] for i in sorted(self.shown)[1:]]
        return node_columns(nodes, self.page.tokens, self.page.second)


@checked
def load_graph(path: str | Path) -> SavedGraph:
    """Open the graph of a flow that `--save-graph` wrote, with the nodes that are pinned in it.

        graph = bilens.load_graph("graph.json").pin("head.26.0@4")
        graph.save("graph.json")

    Raises:
        CheckpointError: the file is damaged, or bilens did not write it.
    """
    content = read_json_object(Path(path))
    try:
        settings = content["metadata"]["generation_settings"][PAGE_KEY]
        nodes = tuple(read_settings(PageNode, node, path) for node in settings["nodes"])
        page = read_settings(FlowPage, {**settings, "nodes": nodes}, path)
        ids = [entry["node_id"] for entry in content["nodes"]]
        pins = [ids.index(pin) for pin in content["qParams"]["pinnedIds"]]
        graph = SavedGraph(page, str(content["metadata"]["prompt"]), (), content)
        graph = graph.pin(*(graph.nodes[row].address for row in pins))
        in_range = [0 <= i < len(ids) == len(nodes) for a, b, _ in page.edges for i in (a, b)]
        n_tokens, positions = len(page.tokens), [(x.position, x.source) for x in nodes]
        in_range += [0 <= (x or 0) < n_tokens for pair in positions for x in pair]
        if not nodes or nodes[0].kind != "output" or not all(in_range):
            raise ValueError("numbers of nodes or positions are out of range")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no graph that `bilens flow --save-graph` of this version wrote: {error!r}"
        ) from error
    return graph
