"""One view of any transformer that adds to a residual stream, the start of all readings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.activations import LinearActivation

from bilens.checks import check_finite, check_index, check_text, check_weights, full_precision
from bilens.errors import BilensError, NotBilinearError
from bilens.nn import Gate
from bilens.residual.attention import QueriesKeys, queries_keys
from bilens.residual.families import parts_of
from bilens.residual.layers import Layer
from bilens.residual.parts import ConstantNorm, working_dtype
from bilens.residual.texts import text_ids
from bilens.residual.trace import Trace, mlp_inputs, trace
from bilens.settings import Place
from bilens.tensor import BilinearTensor, FactoredMatrix


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Value and output weights of a layer's heads, norms and scales folded in.

    A head that attends to a normalised row n adds its weight in the pattern times (n V + b) O.

    Attributes:
        value: V.
        value_bias: b.
        out: O.
        out_bias: bias of the output, which belongs to no head and is added once.
    """

    value: Float[Tensor, "heads d_model d_head"]
    value_bias: Float[Tensor, "heads d_head"]
    out: Float[Tensor, "heads d_head d_model"]
    out_bias: Float[Tensor, " d_model"]


class ValueSource(NamedTuple):
    """Weights of the heads' values that read one normalised stream.

    Attributes:
        layer: number of the layer whose stream is read.
        value: V.
        bias: the values' bias.
    """

    layer: int
    value: Float[Tensor, "heads d_model d_head"]
    bias: Float[Tensor, "heads d_head"]

    def values(self, n: Float[Tensor, "rows d_model"]) -> Float[Tensor, "heads rows d_head"]:
        """Return the values of normalised rows, n V + bias."""
        return n @ self.value + self.bias[:, None]


@full_precision
class ResidualModel:
    """Embedding, unembedding and, for each layer, the maps that read the stream or write to it.

    All inputs are in one basis, that of the normalised stream

        n = x / |x| sqrt(d_model)      (after centring in models with LayerNorms)

    before the norm's gain. The gain is folded into the maps, and so are all constant factors
    of the model. Without norms n = x. Outputs are in the stream x itself. Weights are returned
    in float32, or in float64 if they are stored so. The model does not change. Methods that take a
    layer or a text raise BilensError for a number that the model does not have.

    Args:
        model: a causal language model of bilens, or of a family in `bilens.residual.families`;
            `bilens.register_family` adds families.
        tokenizer: for tokens by name.

    Attributes:
        model: the model itself.
        tokenizer: its tokenizer, or None.
        parts: the modules of the model, by their role.

    Raises:
        BilensError: the family is not known, or the model is not what its family says.
        CheckpointError: a weight is NaN or infinite.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        check_weights(model)
        check_unhooked(model)
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self.parts = parts_of(model)

    # What it is.

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.parts.layers)

    @property
    def n_heads(self) -> int:
        """Attention heads of each layer."""
        return self.parts.layers[0].heads.n_heads

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.parts.embed.module.embedding_dim

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have an embedding."""
        return self.parts.embed.module.num_embeddings

    @property
    def device(self) -> torch.device:
        """Device of the embedding."""
        return self.parts.embed.module.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights that are returned: float64 if stored so, else float32."""
        return working_dtype(self.parts.embed.module.weight.dtype)

    @property
    def has_norms(self) -> bool:
        """True if the scale before the unembedding depends on the text."""
        return self.parts.norm is not None and not isinstance(self.parts.norm, ConstantNorm)

    def to(self, device: torch.device | str) -> "ResidualModel":
        """Move the model to another device and return this view."""
        self.model.to(device)
        return self

    # Tokens.

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """Embedding of each token, without positions, one row for each token."""
        return self.parts.embed.weight() * self.parts.embed.scale

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding of the normalised stream after the last layer, one column for each token."""
        return self.unembed()[0]

    @property
    def b_U(self) -> Float[Tensor, " vocab"]:
        """Bias of each logit, from the final norm and the unembedding."""
        return self.unembed()[1]

    def unembed(
        self, tokens: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "d_model n"], Float[Tensor, " n"]]:
        """Return W_U and b_U, or only their columns of these tokens."""
        part, scale = self.parts.unembed, self.parts.logit_scale
        if tokens is not None:
            # Folding the norm into all rows would cost more than the few that are asked for.
            part = replace(part, rows=torch.as_tensor(tokens, device=self.device).long())
        weight, bias = self._read(part, self.parts.norm)
        return scale * weight.T, weight.new_zeros(len(weight)) if bias is None else scale * bias

    def embedded(
        self, tokens: Int[Tensor, " n"], position: int | None = None
    ) -> Float[Tensor, "n d_model"]:
        """Return the stream before the first layer of tokens at one position, (n, d_model).

        Raises:
            BilensError: the model has learned positions and `position` is missing or out of range.
        """
        self._check_ids(tokens, "tokens")
        x = self.parts.embed.rows(tokens)
        table = self.parts.positions
        if table is None:
            return x
        if position is None:
            raise BilensError(
                "position=None, and the model has learned positions, which add a vector of their "
                "own to every token; set position to a place in the text"
            )
        learned = "the positions that the model has learned"
        check_index("position", position, table.module.num_embeddings, learned)
        return x + table.rows(torch.tensor(position, device=self.device))

    def token(self, name: str) -> int:
        """Return the number of a token by its name.

        Raises:
            BilensError: the model has no tokenizer, or the name is not a single token.
        """
        if self.tokenizer is None:
            raise BilensError(
                f"token={name!r}, but the model came without a tokenizer; pass the number of the "
                "token, or ResidualModel(model, tokenizer)"
            )
        check_text("token", name)
        vocabulary = self.tokenizer.get_vocab()
        if name in vocabulary:
            return int(vocabulary[name])
        pieces = self.tokenizer(name, add_special_tokens=False)["input_ids"]
        # A tokenizer returns one piece for an unknown name, too.
        same = str(self.tokenizer.decode(pieces)).strip().casefold() == name.strip().casefold()
        if len(pieces) == 1 and same:
            return int(pieces[0])
        shown = " ".join(self.tokenizer.convert_ids_to_tokens(pieces))
        nearest = get_close_matches(name.lower(), vocabulary, n=5, cutoff=0.5)
        raise BilensError(
            f"token={name!r}, expected a single token of the vocabulary"
            + (f"; it is cut into {shown}" if shown else "")
            + (f"; the nearest are {', '.join(nearest)}" if nearest else "")
        )

    # Directions and layers.

    def direction(
        self, token: str | int, minus: str | int | Sequence[str | int] = ()
    ) -> Float[Tensor, " d_model"]:
        """Return W_U of a token, minus the mean of W_U of the tokens to compare with.

        The difference of their logits is the product of this direction and the final normalised
        stream, up to the unembedding's bias. Tokens are given by name or by number.

        Raises:
            BilensError: a token is not in the vocabulary.

        Source:
            Pearce et al. 2024, figure 7.
        """
        others = [minus] if isinstance(minus, (str, int)) else list(minus)
        numbers = [
            self.token(item)
            if isinstance(item, str)
            else check_index(name, item, self.parts.unembed.n_out, "the number of a token")
            for name, item in [("token", token), *(("minus", other) for other in others)]
        ]
        W_U, _ = self.unembed(numbers)
        return W_U[:, 0] - W_U[:, 1:].mean(1) if others else W_U[:, 0]

    def layer(self, layer: int) -> Layer:
        """Return the parts of a layer."""
        layer_parts = self.parts.layers[check_index("layer", layer, self.n_layers)]
        check_unhooked(layer_parts.module, layer_parts.name)
        return layer_parts

    @torch.no_grad()
    def mlp(self, layer: int) -> BilinearTensor:
        """Return the MLP of a layer as a tensor, from the normalised stream to the MLP's output.

        Biases become the constant coordinate. The gain of a norm after the MLP is folded in. Its
        scale depends on the text and is left out.

        Raises:
            NotBilinearError: the MLP has no gate, or an activation that is not linear.

        Source:
            Pearce et al. 2024, sections 3.2 and 6.3.
        """
        mlp = self.layer(layer).mlp
        if mlp.gate is None:
            raise NotBilinearError(
                f"{mlp.name} has no gate, so that there is no product in it, and it is not a "
                "tensor. Read heads and n-grams of the stream, or a model with gated MLPs."
            )
        activation = mlp.activation_function()
        plain = isinstance(activation, (LinearActivation, nn.Identity))
        slope = activation.slope if isinstance(activation, Gate) else 1.0 if plain else None
        if slope is None:
            raise NotBilinearError(
                f"{mlp.name} has an activation that is not linear, {activation}, so "
                "it is not a tensor. `bilens linearise` fits lines, `bilens anneal` trains it."
            )
        return self.mlp_factors(layer, slope)

    @torch.no_grad()
    def mlp_factors(self, layer: int, slope: float = 1.0) -> BilinearTensor:
        """Return the tensor of an MLP whose activation is replaced by act(z) = slope z.

        With the gate ratios of a `Trace` as weights of its hidden units the same factors are the
        MLP on a text, exactly. An MLP without a gate is D (up(x) * 1), with the constant
        coordinate. If act(0) is not 0, a second set of hidden units holds up(x) * 1.

        Raises:
            BilensError: the layer does not exist, or the slope is not finite.
        """
        check_finite(slope=torch.tensor(slope))
        mlp = self.layer(layer).mlp
        left, left_bias = self._read(mlp.up, mlp.norm)
        right: Tensor = torch.zeros_like(left)
        right_bias: Tensor | None = left.new_ones(len(left))
        if mlp.gate is not None:
            right, right_bias = self._read(mlp.gate, mlp.norm)
        right = slope * right
        right_bias = None if right_bias is None else slope * right_bias
        out, out_bias = self._write(mlp.down, mlp.out_norm)
        if mlp.act_of_zero() is not None:
            # The factor that is not under the activation, times 1: of an MLP without a gate 1 * 1.
            zero, ones = torch.zeros_like(left), left.new_ones(len(left))
            plain = mlp.gate is None
            left_bias = left.new_zeros(len(left)) if left_bias is None else left_bias
            right_bias = right.new_zeros(len(left)) if right_bias is None else right_bias
            left_bias = torch.cat([left_bias, ones if plain else left_bias])
            left = torch.cat([left, zero if plain else left])
            right, right_bias = torch.cat([right, zero]), torch.cat([right_bias, ones])
            out = torch.cat([out, out], 1)
        tensor = BilinearTensor(left, right, out)
        if left_bias is None and right_bias is None and out_bias is None:
            return tensor
        return tensor.with_bias(left_bias, right_bias, out_bias)

    @torch.no_grad()
    def mlp_reads(self, layer: int) -> dict[str, Float[Tensor, "hidden d_model"]]:
        """Return the input weights of an MLP by name: L and R with a gate, `in` without one."""
        mlp = self.layer(layer).mlp
        names = {"in": mlp.up} if mlp.gate is None else {"L": mlp.up, "R": mlp.gate}
        return {name: self._read(part, mlp.norm)[0] for name, part in names.items()}

    @torch.no_grad()
    def mlp_writes(self, layer: int) -> Float[Tensor, "d_model hidden"]:
        """Return the output weights D of an MLP."""
        mlp = self.layer(layer).mlp
        return self._write(mlp.down, mlp.out_norm)[0]

    @torch.no_grad()
    def heads(self, layer: int) -> HeadWeights:
        """Return the value and output weights of the heads of a layer.

        With `value_mix` these are the layer's own values, times their share.
        """
        heads = self.layer(layer).heads
        value, value_bias = self._read(heads.value, heads.norm)
        out, out_bias = self._write(heads.out, heads.out_norm)
        bias = value.new_zeros(len(value)) if value_bias is None else value_bias
        if heads.v_first_share is not None:
            share = 1 - heads.v_first_share.detach().to(value)
            value, bias = share * value, share * bias

        def by_head(values: Tensor) -> Tensor:
            split = values.unflatten(0, (heads.n_kv_heads, heads.d_head))
            return split.repeat_interleave(heads.sharing, 0)

        return HeadWeights(
            value=by_head(value).mT,
            value_bias=by_head(bias),
            out=out.T.unflatten(0, (heads.n_heads, heads.d_head)),
            out_bias=out.new_zeros(len(out)) if out_bias is None else out_bias,
        )

    def value_sources(self, layer: int) -> list[ValueSource]:
        """Return the weights of the heads' values, whose outputs are to be added up.

        The heads read n of their own layer and, with `value_mix`, that of the first one too.
        """
        weights = self.heads(layer)
        sources = [ValueSource(layer, weights.value, weights.value_bias)]
        share = self.layer(layer).heads.v_first_share
        if share is not None:
            first, of_first = self.heads(0), self.layer(0).heads.v_first_share
            assert of_first is not None
            mixed = (share / (1 - of_first)).detach().to(first.value)
            sources.append(ValueSource(0, mixed * first.value, mixed * first.value_bias))
        return sources

    def ov(self, layer: int) -> FactoredMatrix:
        """Return W_V W_O of every head, without biases: attending to a row n adds n OV.

        Source:
            Elhage et al. 2021, "Splitting attention heads into query-key and output-value
            circuits".
        """
        weights = self.heads(layer)
        return FactoredMatrix(weights.value, weights.out)

    @torch.no_grad()
    def qk(self, layer: int, distance: Place = 0) -> tuple[FactoredMatrix, ...]:
        """Return W_Q R W_K' of every head, one batch for each pair of queries and keys.

        The score of row n for a row m, `distance` positions earlier, is n QK m'. R rotates rotary
        queries by the distance. Gains of norms of queries and keys are in it, their scales, biases
        and positions that are vectors are not.

        Returns:
            Two batches for bilinear and differential attention, otherwise one. The batch axis is
            the heads.

        Raises:
            BilensError: the distance is negative.

        Source:
            Elhage et al. 2021, as for `ov`.
        """
        asked = self.query_key_maps(layer, distance)
        answered = self.query_key_maps(layer, 0)
        return tuple(
            FactoredMatrix(q[:-1].transpose(0, 1), k[:-1].permute(1, 2, 0))
            for (q, _), (_, k) in zip(asked, answered, strict=True)
        )

    @torch.no_grad()
    def query_key_maps(self, layer: int, position: Place) -> QueriesKeys:
        """Return the maps from normalised rows n at a position to queries and keys, [n, 1] @ map.

        They include rotation, the scores' scale and the gains of norms of queries and keys.

        Returns:
            One or two pairs of (d_model + 1, heads, d_head). The last row is the output of biases
            and of positions that are vectors.
        """
        norm = self.layer(layer).heads.norm
        basis = torch.eye(self.d_model, dtype=self.dtype, device=self.device)
        none = torch.zeros_like(basis[:1])
        if norm is not None:
            basis = norm.folded(basis, None)[0].T
            bias = norm.bias()
            none = none if bias is None else bias[None]
            basis = basis + none
        pairs = self._queries_keys(layer, torch.cat([basis, none]), position, linear=True)

        def without_bias(rows: Tensor) -> Tensor:
            return torch.cat([rows[:-1] - rows[-1:], rows[-1:]])

        return [(without_bias(q), without_bias(k)) for q, k in pairs]

    @torch.no_grad()
    def queries_keys(
        self, layer: int, n: Float[Tensor, "rows d_model"], position: Place
    ) -> QueriesKeys:
        """Return queries and keys of normalised rows at one position.

        They include biases, norms of queries and keys, rotation and the scores' scale.

        Returns:
            One or two pairs of (rows, heads, d_head), whose inner products are the scores.
        """
        self._check_width(n, "n")
        norm = self.layer(layer).heads.norm
        x = n if norm is None else norm.applied(n)
        return self._queries_keys(layer, x, position, linear=False)

    @torch.no_grad()
    def mlp_output(
        self, layer: int, x: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        """Return the output of an MLP on streams x, by the modules of the model."""
        self._check_width(x, "x")
        mlp = self.layer(layer).mlp
        stored: Any = mlp.up.module.weight
        y = x.to(stored.dtype)
        y = mlp.module(y if mlp.norm is None else mlp.norm.module(y))
        y = y if mlp.out_norm is None else mlp.out_norm.module(y)
        return self.parts.residual_scale * y.to(x.dtype)

    # Texts.

    def ids(self, text: str | Int[Tensor, " time"]) -> Int[Tensor, " time"]:
        """Return the token ids of a text, (time,) on the model's device; ids pass unchanged.

        A string is cleaned if the model was trained on clean texts, and follows the token that
        texts begin with, if the tokenizer adds one.

        Raises:
            BilensError: there is no tokenizer, or the text is empty, too long or holds no known
                token.
        """
        if isinstance(text, str):
            ids = torch.tensor(text_ids(text, self.tokenizer, self.config), device=self.device)
        else:
            ids = text.to(self.device)
        self._check_ids(ids)
        return ids

    def trace(self, text: str | Int[Tensor, " time"]) -> Trace:
        """Run the model on a text and return its streams, norm scales, patterns and gate ratios."""
        ids = self.ids(text)
        check_unhooked(self.model)
        return trace(self.model, self.parts, ids)

    def mlp_inputs(
        self, layer: int, ids: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time d_model"]:
        """Return the normalised stream that an MLP reads, at every position of texts."""
        self._check_ids(ids)
        mlp = self.layer(layer).mlp
        return mlp.normalised(mlp_inputs(self.model, mlp, ids.to(self.device)))

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocab"]:
        """Return the model's logits, in float32 or float64."""
        self._check_ids(ids)
        output = self.model(ids.to(self.device), use_cache=False)
        return getattr(output, "logits", output).to(self.dtype)

    def _check_width(self, x: Tensor, name: str) -> None:
        if x.shape[-1] != self.d_model:
            raise BilensError(
                f"{name} has shape {tuple(x.shape)}, expected a last axis of {self.d_model}, the "
                "width of the stream"
            )

    def _check_ids(self, ids: Tensor, name: str = "ids") -> None:
        if ids.numel() == 0:
            raise BilensError(f"{name} has shape {tuple(ids.shape)}, expected at least one token")
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(wrong):
            raise BilensError(
                f"{name} holds the number {int(wrong[0])}, expected 0 to {self.vocab_size - 1}, "
                "those of the model's tokens"
            )

    # Norms and constants are folded into maps here and nowhere else.

    def _read(self, part: Any, norm: Any) -> tuple[Tensor, Tensor | None]:
        weight, bias = part.weight(), part.bias()
        return (weight, bias) if norm is None else norm.folded(weight, bias)

    def _write(self, part: Any, norm: Any) -> tuple[Tensor, Tensor | None]:
        scale, weight, bias = self.parts.residual_scale, part.weight(), part.bias()
        if norm is not None:
            weight = norm.folded_after(weight)
            bias = None if bias is None else norm.folded_after(bias)
        return scale * weight, None if bias is None else scale * bias

    def _queries_keys(
        self, layer: int, x: Tensor, position: int, *, linear: bool
    ) -> list[tuple[Tensor, Tensor]]:
        heads = self.parts.layers[layer].heads
        if self.parts.queries_keys is not None:
            return self.parts.queries_keys(heads.module, x, position)
        return queries_keys(self.model, heads, x, position, linear=linear)


def check_unhooked(model: nn.Module, name: str = "") -> None:
    """Check that no forward hook changes or replaces the output of a module.

    Weights would not tell of it. Hooks of bilens are there while it traces or ablates, those of
    transformers only record.
    """
    for part, module in model.named_modules(prefix=name):
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            home = getattr(hook, "__module__", type(hook).__module__)
            if not home.startswith(("bilens.", "transformers.")):
                hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)
                raise BilensError(
                    f"{part or 'the model'} has a forward hook, {home}.{hook_name}, expected none: "
                    "readings of weights cannot see its effect. Remove it by the handle that "
                    "register_forward_hook returned; pruning and weight norms have remove() too"
                )
