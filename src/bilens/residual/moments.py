"""Moments of a forward pass at which the residual stream is read and written."""


class Moment(int):
    """A state of the residual stream, numbered in the order of the forward pass.

    A component that reads at a moment sees all that was written up to it. A layer passes through
    three: it mixes the embedding in (in a few architectures), its heads write, its MLP writes.
    """

    @classmethod
    def embedding(cls) -> "Moment":
        """Return the moment after the embedding."""
        return cls(0)

    @classmethod
    def input(cls, layer: int) -> "Moment":
        """Return the moment at which the heads of a layer read."""
        return cls(3 * layer + 1)

    @classmethod
    def attention(cls, layer: int) -> "Moment":
        """Return the moment after the heads of a layer have written."""
        return cls(3 * layer + 2)

    @classmethod
    def mlp(cls, layer: int) -> "Moment":
        """Return the moment after the MLP of a layer has written."""
        return cls(3 * layer + 3)

    @classmethod
    def count(cls, n_layers: int) -> int:
        """Return the number of moments of a model."""
        return 3 * n_layers + 1
