"""A cut of a classifier on images: its coordinates and their effects, and drawings of them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float64
from torch import Tensor

from bilens.data import ImageData
from bilens.tensor import Cut, Products
from bilens.tensor.chain import with_signs

LEAST_DRAWN = 0.03
"""Share of a direction's squared norm, below which a product is neither drawn nor listed."""
BondNode = tuple[int, int]


@dataclass(frozen=True, eq=False)
class BondDirection:
    """One coordinate of a cut model, by its bond (the input's is 0) and its number there.

    Attributes:
        bond: number of the bond.
        number: its number there.
        share: U_kk, the share of the model's squared norm lost if one use of it is removed.
        images: numbers of the test images at which it is largest, and at which it is smallest.
        effects: loss of each logit when it is set to zero, minus the mean loss of all logits. It is
            averaged over the 2 % of the test images nearest to either end.
    """

    bond: int
    number: int
    share: float
    images: tuple[tuple[int, ...], tuple[int, ...]]
    effects: tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class CutReading:
    """A cut model, and the effect of each coordinate on test images.

    The coordinates are those of the test images at each bond, the input's first, and then the
    logits.
    """

    cut: Cut
    data: ImageData
    coordinates: tuple[Float64[Tensor, "images _"], ...]

    @classmethod
    def of(cls, cut: Cut, data: ImageData) -> "CutReading":
        """Run test images through a cut."""
        cut = with_signs(cut)
        return cls(cut, data, tuple(cut.coordinates(data.test_images)))

    @cached_property
    def products(self) -> Products:
        """Products of two coordinates that the layers sum, the largest share first."""
        return self.cut.products()

    @torch.no_grad()
    def direction(self, bond: int, number: int) -> BondDirection:
        """Return one coordinate with its effects at both ends."""
        z = self.coordinates[bond]
        # A few images would be chance, and many would not be at the end.
        near = max(1, round(0.02 * len(z)))
        order = z[:, number].argsort(descending=True)
        ends = (order, order.flip(0))
        images = [tuple(end[:4].tolist()) for end in ends]
        effects = [_effects(self.cut, bond, z[end[:near]], number) for end in ends]
        # The environment is all of the model but one use of the bond, so its diagonal has the
        # squared norm that this use carries.
        share = float(self.cut.environments[bond][number, number])
        return BondDirection(bond, number, share, (images[0], images[1]), (effects[0], effects[1]))

    def pixels(self, bond: int, number: int) -> list[Float64[Tensor, " n_in"]]:
        """Return a coordinate, or a logit, pulled back to the input as one or two pictures.

        An input coordinate is one picture. Any other is a quadratic form of the coordinates below
        it. The pictures are those of its strongest eigenvector of either sign, the positive one
        first, each followed down to the input along the strongest eigenvectors.
        """
        cut = self.cut
        if bond == 0:
            return [cut.write[:, number]]
        # Eigenvalues ascend: the last is the most positive, the first the most negative.
        _, vectors = torch.linalg.eigh(cut.cores[bond - 1].interaction(output=number).dense())
        pictures = []
        for end in (-1, 0):
            v = vectors[:, end]
            for core in reversed(cut.cores[: bond - 1]):
                values, below = torch.linalg.eigh(core.interaction(v).dense())
                v = below[:, values.abs().argmax()]
            picture = cut.write @ v
            # The sign of an eigenvector is arbitrary, since the form squares it.
            pictures.append(picture if picture.sum() >= 0 else -picture)
        return pictures


def _effects(cut: Cut, bond: int, z: Tensor, i: int) -> tuple[float, ...]:
    """Return the mean loss of each logit when a coordinate is set to zero."""
    without = z.clone()
    without[:, i] = 0
    # One pass for both halves.
    rows = torch.cat([z, without])
    for core in cut.cores[bond:]:
        rows = core(rows)
    complete, rest = rows.chunk(2)
    return tuple((complete - rest).mean(0).tolist())


@dataclass(frozen=True)
class ProductEdge:
    """A product of two coordinates that adds to a third, or to an output.

    A coordinate is the number of its bond and its own. The sources are twice the same for a square.
    The part is the product's share of the squared norm of the target.
    """

    target: BondNode
    sources: tuple[BondNode, BondNode]
    coefficient: float
    part: float


def chosen_edges(products: Products, depth: int, output: int) -> list[ProductEdge]:
    """Return the products that make up most of an output, then most of their factors, and so on.

    The products are those of a cut model of `depth` layers.
    """
    edges: list[ProductEdge] = []
    # From the output down: sources of a layer are targets of the layer below.
    targets = {output}
    for layer in reversed(range(depth)):
        sources: set[int] = set()
        for target in sorted(targets):
            into = edges_into(products, (layer + 1, target), 4 if layer == depth - 1 else 2)
            # Thinner lines hide the others; the strongest product is always there.
            into = [edge for edge in into if edge.part >= LEAST_DRAWN] or into[:1]
            edges += into
            # Two targets may have a source in common, which is drawn once.
            sources |= {i for edge in into for _, i in edge.sources}
        targets = sources
    return edges


def edges_into(products: Products, target: BondNode, k: int) -> list[ProductEdge]:
    """Return the k products of two coordinates that make up most of a third, or of an output."""
    layer, output = target[0] - 1, target[1]
    into = (products.layer == layer) & (products.output == output)
    total = float(products.share[into].sum()) or 1.0
    edges = []
    # Products are sorted by share, so the first rows are the strongest.
    for row in torch.nonzero(into).flatten()[:k].tolist():
        sources = ((layer, int(products.first[row])), (layer, int(products.second[row])))
        part = float(products.share[row]) / total
        edges.append(ProductEdge(target, sources, float(products.coefficient[row]), part))
    return edges
