"""One view of any transformer that adds to a residual stream, the start of all readings."""

import re
from collections.abc import Sequence
from copy import copy
from difflib import get_close_matches
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.activations import LinearActivation

from bilens.checks import check_index, check_weights, checked
from bilens.data.texts import write_out
from bilens.errors import BilensError, NotBilinearError
from bilens.hooks import first_call
from bilens.nn import Gate
from bilens.settings import Count, Index
from bilens.tensor import BilinearTensor, FactoredMatrix
from bilens.transformer.dispatched import check_whole, is_dispatched, with_mapped_weights
from bilens.transformer.families import check_merged, config_numbers, find_modules, known_families
from bilens.transformer.layers import Layer, check_ids
from bilens.transformer.places import find_places, is_causal_model, known_places
from bilens.transformer.queries import ScoredRows, query_key_maps, scored_rows
from bilens.transformer.running import device_of, first_input, run, wide_passes
from bilens.transformer.tokens import (
    check_padding,
    check_text,
    ids_within_text,
    in_bytes,
    listed_ids,
    padding,
    require_tokenizer,
    text_ids,
)


@checked
class ResidualModel:
    """Embedding, unembedding and, for each layer, the maps that read the stream or write to it.

    All inputs are in one basis, that of the normalised stream

        n = x / |x| sqrt(d_model)      (after centring in models with LayerNorms)

    before the norm's gain. The gain is folded into the maps, and so are all constant factors
    of the model. Without norms n = x. Outputs are in the stream x itself. Weights are returned
    in float32, or in float64 if they are stored so. The model does not change. Methods that take a
    layer or a text raise BilensError for a number that the model does not have.

    Args:
        model: a causal language model of bilens, or of a family in `bilens.transformer.families`;
            `bilens.register_family` adds families. Any other of transformers has flows, patches,
            circuits and task directions, which need no maps of its weights.
        tokenizer: for tokens by name.

    Attributes:
        model: the model itself.
        tokenizer: its tokenizer, or None.
        modules: those of the model, by their role; an error for a family that is not known.
        source: where it was opened from, or None.
        chat: whether texts are what a user says in a chat; see `in_chat`.
        places: those at which a pass is recorded, cut and changed.

    Raises:
        BilensError: the model is not causal, its layers are not found, or it is not what its family
            says.
        CheckpointError: a weight is NaN or infinite.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        check_whole(model)
        model = with_mapped_weights(model)
        check_weights(model)
        check_unhooked(model)
        self.model: Any = model
        self.source: Any = None
        self.chat = False
        self.tokenizer = tokenizer
        check_merged(model)
        self._numbers: dict[str, Any] = {}
        kind = type(model).__name__
        if kind in known_families():
            self.modules = find_modules(model)
            self.places = known_places(model, self.modules)
            self._numbers = config_numbers(model)
        elif is_causal_model(model):
            self.places = find_places(model)
        else:
            raise BilensError(
                f"model is a {kind}, whose structure is not known, and which does not predict each "
                "token from earlier ones alone, as flows need; expected a model that "
                "AutoModelForCausalLM of transformers opens, or bilens.register_family() before"
            )

    def __getattr__(self, name: str) -> Any:
        # Only the modules of an unknown family are missing: whoever asks for them is refused.
        if name == "modules" and "model" in vars(self):
            return find_modules(self.model)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    # What it is.

    def __repr__(self) -> str:
        return (
            f"ResidualModel({type(self.model).__name__}, {self.n_layers} layers, {self.n_heads} "
            f"heads, width {self.d_model}, {self.vocab_size:,} tokens, "
            f"{str(self.places.embed.weight.dtype).removeprefix('torch.')})"
        )

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.places.layers)

    @property
    def n_heads(self) -> int:
        """Attention heads of each layer."""
        return self.places.n_heads

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.places.embed.embedding_dim

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have an embedding."""
        return self.places.embed.num_embeddings

    @property
    def device(self) -> torch.device:
        """Device of the embedding, that of token ids."""
        return device_of(self.places.embed.weight)

    def to(self, device: torch.device | str) -> "ResidualModel":
        """Move the model to another device and return this view.

        Raises:
            BilensError: accelerate has placed its parts.
        """
        if is_dispatched(self.model):
            raise BilensError(
                f"device={str(device)!r}, but accelerate has placed the parts of the model; open "
                "it again without device_map, or with another one"
            )
        self.model.to(device)
        return self

    # Tokens.

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """Embedding of each token, without positions, one row for each token."""
        self._check_model()
        return self.modules.embed.weight() * self.modules.embed.scale

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding of the normalised stream after the last layer, one column for each token."""
        self._check_model()
        return self.modules.logit_weights()[0]

    @property
    def b_U(self) -> Float[Tensor, " vocab"]:
        """Bias of each logit, from the final norm and the unembedding."""
        self._check_model()
        return self.modules.logit_weights()[1]

    def token(self, name: str | int) -> int:
        """Return the number of a token by its name: its text, or else the tokenizer's spelling.

        A text stands for the token that it is inside a running text. With tokenizers that put a
        space before every text, as SentencePiece does for Llama 2, "are" is the word " are", which
        is spelled "▁are". "are[598]" and "[598]" are the token of number 598, whatever its text
        stands for. A number is itself.

        Raises:
            BilensError: the model has no embedding of the token, or the name is not a single token,
                or no number in a model without a tokenizer.
        """
        numbers = self.answer(name)
        if len(numbers) == 1:
            return numbers[0]
        raise self._unknown(name, numbers)

    def answer(self, name: str | int) -> list[int]:
        """Return the numbers of the tokens of an answer, such as " New York".

        A name that `token` knows has the number of that token. Without a tokenizer an answer lists
        numbers, as "5 17".

        Raises:
            BilensError: as `token`, but for a text of several tokens.
        """
        if isinstance(name, int):
            return [check_index("token", name, self.vocab_size, "the number of a token")]
        if self.tokenizer is None:
            return [n for token in listed_ids("token", name) for n in self.answer(token)]
        check_text("token", name)
        pieces = ids_within_text(name, self.tokenizer)
        token = self._single(name, pieces)
        if token is not None:
            return [self._check_known(token)]
        if len(pieces) < 2 or self.tokenizer.unk_token_id in pieces:
            raise self._unknown(name, pieces)
        return [self._check_known(token) for token in pieces]

    def _unknown(self, name: str | int, pieces: list[int]) -> BilensError:
        if self.tokenizer is None:
            return BilensError(f"token={name!r}, expected the number of a single token")
        pieces_text = "|".join(self.tokenizer.convert_ids_to_tokens(pieces))
        nearest = get_close_matches(str(name).lower(), self.tokenizer.get_vocab(), n=5, cutoff=0.5)
        return BilensError(
            f"token={name!r}, expected a single token of the vocabulary"
            + (f"; it is cut into |{pieces_text}|" if pieces_text else "")
            + (f"; the nearest are {', '.join(nearest)}" if nearest else "")
        )

    def _single(self, name: str, pieces: list[int]) -> int | None:
        """Return the number of the token of a name, whose text has these pieces."""
        assert self.tokenizer is not None
        # A tokenizer returns one piece for an unknown name, too.
        text = write_out(self.tokenizer, pieces)
        if len(pieces) == 1 and text.strip().casefold() == name.strip().casefold():
            return pieces[0]
        # The whole vocabulary as a dictionary takes seconds where it is large.
        token = self.tokenizer.convert_tokens_to_ids(name)
        if isinstance(token, int) and self.tokenizer.convert_ids_to_tokens(token) == name:
            return token
        match = re.fullmatch(r"(.*)\[(\d{1,9})\]", name, re.DOTALL)
        if match is None:
            return None
        token = int(match[2])
        if not match[1]:
            return check_index("token", token, self.vocab_size, "the number of a token")
        if token >= self.vocab_size:
            return None
        is_named = token < len(self.tokenizer)
        spelling = self.tokenizer.convert_ids_to_tokens(token) if is_named else None
        return token if spelling and match[1] in (spelling, in_bytes(str(spelling))) else None

    def _check_known(self, token: int) -> int:
        """Return the number of a token; raise BilensError if the model has no embedding of it."""
        if token >= self.vocab_size:
            assert self.tokenizer is not None
            raise BilensError(
                f"{self.tokenizer.convert_ids_to_tokens(token)!r} is token {token} of the "
                f"tokenizer, and the model has embeddings of {self.vocab_size} tokens only"
            )
        return token

    # Directions and layers.

    def direction(
        self, token: str | int | Sequence[str | int], minus: str | int | Sequence[str | int] = ()
    ) -> Float[Tensor, " d_model"]:
        """Return the mean W_U of one token or several, minus that of the tokens to compare with.

        The difference of their logits is the product of this direction and the final normalised
        stream, up to the unembedding's bias. Tokens are given by name or by number.

        Raises:
            BilensError: a token is not in the vocabulary, or is subtracted from itself.

        Source: Pearce et al. 2024, figure 7.
        """
        names = [token] if isinstance(token, (str, int)) else list(token)
        others = [minus] if isinstance(minus, (str, int)) else list(minus)
        if not names:
            raise BilensError("token is empty, expected a token, or several")
        numbers = [self._number("token", name) for name in names]
        minus_ids = [self._number("minus", name) for name in others]
        for name, token_id in zip(names, numbers, strict=True):
            if token_id in minus_ids:
                raise BilensError(f"minus has the token {name!r} itself, expected other tokens")
        self._check_model()
        # Each token once. Only these columns, since the whole unembedding is large.
        numbers, minus_ids = [*dict.fromkeys(numbers)], [*dict.fromkeys(minus_ids)]
        W_U, _ = self.modules.logit_weights(numbers + minus_ids)
        direction = W_U[:, : len(numbers)].mean(1)
        return direction - W_U[:, len(numbers) :].mean(1) if minus_ids else direction

    def _number(self, name: str, token: str | int) -> int:
        if isinstance(token, str):
            return self.token(token)
        return check_index(name, token, self.modules.unembed.n_out, "the number of a token")

    def layer(self, layer: int) -> Layer:
        """Return the parts of a layer."""
        self._check_model()
        return self.modules.layers[check_index("layer", layer, self.n_layers)]

    def _check_model(self) -> None:
        """Check that the model still computes what its weights and this view's numbers say."""
        check_unhooked(self.model)
        numbers = config_numbers(self.model) if self._numbers else {}
        differences = [name for name in numbers if numbers[name] != self._numbers[name]]
        if differences:
            name = differences[0]
            raise BilensError(
                f"{name} of the model was {self._numbers[name]} when this view was made, and its "
                f"configuration says {numbers[name]} now; undo the change, or open the model again"
            )

    @torch.no_grad()
    def mlp(self, layer: int) -> BilinearTensor:
        """Return the MLP of a layer as a tensor, from the normalised stream to the MLP's output.

        Biases become the constant coordinate. The gain of a norm after the MLP is folded in. Its
        scale depends on the text and is left out.

        Raises:
            NotBilinearError: the MLP has no gate, or an activation that is not linear.

        Source: Pearce et al. 2024, sections 3.2 and 6.3.
        """
        mlp = self.layer(layer).mlp
        if mlp.router is not None:
            raise NotBilinearError(
                f"{mlp.name} has experts, whose weights depend on the input, so it is no tensor. "
                "Read one expert by model.layer(layer).mlp.expert(number), or a flow."
            )
        if mlp.gate is None:
            raise NotBilinearError(
                f"{mlp.name} has no gate, so that there is no product in it, and it is not a "
                "tensor. Read heads and n-grams of the stream, or a model with gated MLPs."
            )
        # Only a linear activation leaves a product of two linear maps.
        activation = mlp.activation_function()
        plain = isinstance(activation, (LinearActivation, nn.Identity))
        slope = activation.slope if isinstance(activation, Gate) else 1.0 if plain else None
        if slope is None:
            raise NotBilinearError(
                f"{mlp.name} has an activation that is not linear, {activation}, so "
                "it is not a tensor. `bilens linearise` fits lines, `bilens anneal` trains it."
            )
        return mlp.factors(slope)

    def ov(self, layer: int) -> FactoredMatrix:
        """Return W_V W_O of every head, without biases: attending to a row n adds n OV.

        Source: Elhage et al. 2021, "Splitting attention heads into query-key and output-value
            circuits".
        """
        weights = self.layer(layer).heads.weights()
        return FactoredMatrix(weights.value, weights.out)

    @torch.no_grad()
    def qk(self, layer: int, distance: Index = 0) -> tuple[FactoredMatrix, ...]:
        """Return W_Q R W_K' of every head, one batch for each pair of queries and keys.

        The score of row n for a row m, `distance` positions earlier, is n QK m'. R rotates rotary
        queries by the distance. Gains of norms of queries and keys are in it, their scales, biases
        and positions that are vectors are not.

        Returns:
            Two batches for bilinear and differential attention, otherwise one. The batch axis is
            the heads.

        Raises:
            BilensError: the distance is negative, or the layer does not see so far.

        Source: Elhage et al. 2021, as for `ov`.
        """
        self.layer(layer)  # as its weights are now
        length = distance + 1  # by which some models choose the frequencies of both
        keys = query_key_maps(self.model, self.modules, layer, 0, length)
        queries = keys
        if distance:  # which takes another pass of the model up to the layer
            queries = query_key_maps(self.model, self.modules, layer, distance, length)
        return tuple(
            FactoredMatrix(q[:-1].transpose(0, 1), k[:-1].permute(1, 2, 0))
            for (q, _), (_, k) in zip(queries, keys, strict=True)
        )

    @torch.no_grad()
    def queries_keys(
        self,
        layer: int,
        n: Float[Tensor, "rows d_model"],
        position: Index,
        length: Count | None = None,
    ) -> ScoredRows:
        """Return queries and keys of normalised rows at one position.

        They include biases, norms of queries and keys, rotation and the scores' scale.

        Args:
            layer: number of the layer.
            n: the rows.
            position: of the rows.
            length: number of tokens of the text, by which some models choose the frequencies of
                rotary positions; by default the position is the last one.

        Returns:
            One or two pairs of (rows, heads, d_head), whose inner products are the scores.

        Raises:
            BilensError: the rows do not have the width of the stream.
        """
        if n.shape[-1] != self.d_model:
            raise BilensError(
                f"n has shape {tuple(n.shape)}, expected a last axis of {self.d_model}, the width "
                "of the stream"
            )
        x = self.layer(layer).heads.applied(n)
        return scored_rows(self.model, self.modules, layer, x, position, length)

    # Texts.

    def ids(self, text: str | Int[Tensor, " any_time"], until: int = -1) -> Int[Tensor, " time"]:
        """Return the token ids of a text, (time,) on the model's device; ids pass unchanged.

        The last one is at the position `until`, counted from the end if negative.

        A string is cleaned if the model was trained on clean texts, and follows the token that
        texts begin with, if the tokenizer adds one. No token that ends texts is added. For a model
        without a tokenizer a string lists ids, as "5 17 3".

        Raises:
            BilensError: the model has no embedding of a token, or it has no tokenizer and the text
                lists no numbers, or a chat no template.
        """
        if isinstance(text, str):
            numbers = text_ids(text, self.tokenizer, self.model.config, chat=self.chat)
            if self.tokenizer is not None:
                numbers = [self._check_known(token) for token in numbers]
            text = torch.tensor(numbers)
        ids = checked_ids(self, text)
        if not -len(ids) <= until < len(ids):
            raise BilensError(f"position={until}, expected {-len(ids)} to {len(ids) - 1}")
        return ids[: until % len(ids) + 1]

    @torch.no_grad()
    def mlp_inputs(
        self, layer: int, ids: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time d_model"]:
        """Return the normalised stream that an MLP reads, at every position of texts."""
        mlp, ids = self.layer(layer).mlp, checked_ids(self, ids)
        with wide_passes(self.model):
            args, kwargs = first_call(mlp.norm_or_module, lambda: run(self.model, ids))
        return mlp.normalised(first_input(args, kwargs).to(self.places.dtype))

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocab"]:
        """Return the model's logits, in float32 or float64.

        A text after padding has those of the text alone, and its padding has zeros.
        """
        check_ids(self.vocab_size, ids)
        starts = padding(ids, self.tokenizer, self.model.config)
        if starts.any():
            # Texts with as much padding run together.
            groups = {i: self.logits(ids[starts == i, i:]) for i in starts.unique().tolist()}
            some = next(iter(groups.values()))
            logits = some.new_zeros((*ids.shape, some.shape[-1]))
            for start, of_texts in groups.items():
                logits[starts == start, start:] = of_texts
            return logits
        with wide_passes(self.model):
            output = run(self.model, ids.to(self.device))
        return getattr(output, "logits", output).to(self.places.dtype)


def in_chat(model: ResidualModel) -> ResidualModel:
    """Return a view of a model that reads each text as what a user says in a chat.

    A text is put into the tokenizer's chat template, up to where the model answers. Ids are read
    as they are.

        bilens.flow(bilens.transformer.in_chat(model), "What is the capital of France?")

    Raises:
        BilensError: the model has no tokenizer.
    """
    require_tokenizer(model.tokenizer)
    view = copy(model)
    view.chat = True
    return view


def check_unhooked(model: nn.Module) -> None:
    """Check that each module of a model runs its own forward pass: no hook, patch or compiled one.

    Weights would not tell of it. Hooks of bilens are there in its own passes, those of transformers
    only record, those of accelerate move tensors between devices.
    """
    everywhere = (
        *torch.nn.modules.module._global_forward_hooks.values(),
        *torch.nn.modules.module._global_forward_pre_hooks.values(),
    )
    if everywhere:
        _check_hooks("All modules", everywhere)
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if hooks:
            _check_hooks(name or "the model", hooks)
        # Hooks, which record streams, have no effect in compiled code.
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise BilensError(
                f"{name or 'the model'} is compiled, so that streams cannot be recorded in it. Use "
                "compiled = torch.compile(model) in place of model.compile(), and read the model"
            )
        forward = vars(module).get("forward")
        if forward is not None and not hasattr(module, "_hf_hook") and not _is_known(forward):
            raise BilensError(
                f"{name or 'the model'} has a forward pass of its own, "
                f"{getattr(forward, '__qualname__', forward)}, in place of that of its class: "
                "readings of weights cannot see its effect. Remove it: del module.forward"
            )


def _check_hooks(name: str, hooks: Sequence[Any]) -> None:
    for hook in hooks:
        if not _is_known(hook):
            kind = hook if hasattr(hook, "__qualname__") else type(hook)
            raise BilensError(
                f"{name} has a forward hook, {kind.__module__}.{kind.__qualname__}, expected none: "
                "readings of weights cannot see its effect. Remove it by the handle that "
                "register_forward_hook returned; pruning and weight norms have remove() too"
            )


def _is_known(function: Any) -> bool:
    inner = getattr(function, "func", function)  # of functools.partial
    home = getattr(inner, "__module__", None) or type(inner).__module__
    return home.startswith(("bilens.", "transformers."))


def checked_ids(
    model: ResidualModel, ids: Int[Tensor, "*texts time"]
) -> Int[Tensor, "*texts time"]:
    """Return token ids on the model's device.

    Raises:
        BilensError: they are no numbers of its tokens, or begin with padding.
    """
    check_ids(model.vocab_size, ids)
    check_padding(ids, model.tokenizer, model.model.config)
    return ids.to(model.device)
