"""Image classifiers made of gated layers."""

from copy import deepcopy
from dataclasses import replace
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.checks import check_finite, check_labels, detached
from bilens.errors import BilensError, NotBilinearError
from bilens.hooks import evaluating
from bilens.nn.checkpoint import Checkpointed
from bilens.nn.layers import GatedLayer, ScalarNorm, make_norm
from bilens.nn.settings import ClassifierConfig
from bilens.settings import Count
from bilens.tensor import BilinearTensor, Cut
from bilens.tensor.factors import affine, fit_input, wide_device


class ImageClassifier(Checkpointed):
    """logits = U (g_n ( ... g_1(E x))): linear embedding, gated layers, linear unembedding.

    Args:
        config: architecture and sizes of the model.

    Source: Pearce et al. 2024, section 5 and appendix A.
    """

    model_type: ClassVar[str] = "image-classifier"
    config_class = ClassifierConfig

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.n_inputs, config.d_model, bias=config.bias)
        self.layers = nn.ModuleList(
            GatedLayer(
                config.d_model,
                config.d_model,
                config.d_hidden,
                gate=config.gate,
                beta=config.beta,
                bias=config.bias,
                residual=config.residual,
            )
            for _ in range(config.n_layers)
        )
        self.norms = nn.ModuleList(
            make_norm(config.norm, config.d_model) for _ in range(config.n_layers + 1)
        )
        self.unembed = nn.Linear(config.d_model, config.n_classes, bias=config.bias)

    def __repr__(self) -> str:
        config, weight = self.config, self.embed.weight
        height, width = config.image_shape or (1, config.n_inputs)
        layers = f"{config.n_layers} layer{'s' * (config.n_layers > 1)} of width {config.d_model}"
        count = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"ImageClassifier({height}x{width} pixels, {layers}, {config.n_classes} classes, "
            f"{count:,} parameters, {str(weight.dtype).removeprefix('torch.')} on {weight.device})"
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw initial weights anew, of variance 1 / inputs, or with one layer a third of it.

        One layer begins as torch's maps do; the effective rank of its spectra depends on it. The
        logits of n layers are a product of 3 * 2^n - 1 maps, so three layers would begin with
        logits of 4e-9 on MNIST, where gradients are a hundredth of Adam's eps and some seeds stay
        at chance. With variance 1 / inputs each map keeps the size of its inputs, but each product
        squares it: outputs of many layers vanish, or grow without limit.

        Source: LeCun et al. 1998, "Efficient BackProp", section 4.6, for more than one layer.
        """
        variance = 1 if self.config.n_layers > 1 else 1 / 3
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # A uniform distribution up to a bound has a third of its square as variance.
                bound = (3 * variance / module.in_features) ** 0.5
                nn.init.uniform_(module.weight, -bound, bound, generator=generator)
                if module.bias is not None:
                    bound = module.in_features**-0.5
                    nn.init.uniform_(module.bias, -bound, bound, generator=generator)
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Float[Tensor, "*batch n_inputs"]) -> Float[Tensor, "*batch n_classes"]:
        """Return the logits of flattened images."""
        hidden: Tensor = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            hidden = layer(norm(hidden))
        return self.unembed(self.norms[-1](hidden))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed.weight.device

    def readable(self) -> "ImageClassifier":
        """Return the model itself, or a copy on the CPU if its device lacks float64."""
        device = wide_device(self.device)
        return self if device == self.device else deepcopy(self).to(device)

    def layer_tensors(self) -> list[BilinearTensor]:
        """Return one tensor for each layer after the embedding; each reads the outputs of the last.

        Scalar norms are folded in, and the unembedding into the last. With biases or residuals each
        has the constant coordinate. They are on the device of the model, or on the CPU if that has
        no float64.

        Raises:
            NotBilinearError: a gate is not linear, or the model has a norm other than a scalar one.
        """
        if self.config.norm not in ("none", "scalar"):
            raise NotBilinearError(
                f"The model has norm={self.config.norm!r}, which divides by the length of its "
                "input, so from pixels to logits it is not a tensor. Each layer is one, on its "
                "normalised input: model.layers[0].tensor()."
            )
        model = self.readable()
        chain = [layer.tensor(f"layers[{i}]") for i, layer in enumerate(model.layers)]  # type: ignore[operator]
        outputs = model.unembed.weight
        if self.config.norm == "scalar":
            *scales, last = (norm.scale for norm in cast(list[ScalarNorm], model.norms))
            # A scalar norm is a number, which scales the inputs of the layer after it.
            same = torch.eye(self.config.d_model, dtype=outputs.dtype, device=outputs.device)
            pairs = zip(chain, scales, strict=True)
            chain = [tensor.change_basis(inputs=scale * same) for tensor, scale in pairs]
            outputs = last * outputs
        chain[-1] = chain[-1].change_basis(outputs=outputs)
        if model.unembed.bias is not None:
            chain[-1] = chain[-1].with_bias(out=model.unembed.bias)
        chain[-1] = replace(chain[-1], names=self.config.class_names)
        return chain

    def tensors(self) -> list[BilinearTensor]:
        """Return `layer_tensors` from the pixels on, with the embedding folded into the first."""
        model = self.readable()
        first, *others = model.layer_tensors()
        return [first.change_basis(inputs=model.embedding()), *others]

    def embedding(self) -> Float[Tensor, "d_model n_inputs"]:
        """Return the map from pixels to the first of `layer_tensors`, the constant included."""
        if self.config.bias or self.config.residual:
            return affine(self.embed.weight, self.embed.bias)
        return self.embed.weight

    def tensor(self) -> BilinearTensor:
        """Return the model as one tensor, from pixels to logits.

        Raises:
            NotBilinearError: the model is deeper, or as for `layer_tensors`.
        """
        self.require_single_layer()
        return self.tensors()[0]

    def require_single_layer(self) -> None:
        """Raise unless the model has one layer, and so is one tensor."""
        depth = len(self.layers)
        if depth > 1:
            raise NotBilinearError(
                f"The model has {depth} layers, so its logits are of degree {2**depth} in the "
                "pixels, not one bilinear tensor. model.tensors() returns one for each layer."
            )

    @classmethod
    @torch.no_grad()
    def from_cut(cls, cut: Cut, config: ClassifierConfig) -> "ImageClassifier":
        """Return a cut model as an ordinary classifier, with the width of its widest bond.

        Narrower layers are padded with zeros. Biases and residuals of the original model are in the
        layers; only the embedding has a bias. Data and classes are those of `config`, whose inputs
        and outputs the cut must have.
        """
        n_inputs, n_classes = cut.read.shape[1] - cut.constant, cut.cores[-1].n_out
        if (n_inputs, n_classes) != (config.n_inputs, config.n_classes):
            raise BilensError(
                f"cut has {n_inputs} inputs and {n_classes} outputs; expected "
                f"{config.n_inputs} and {config.n_classes}, as in config"
            )
        sizes = replace(
            config,
            d_model=max(*cut.ranks, n_classes),
            d_hidden=max(core.rank for core in cut.cores),
            n_layers=len(cut.cores),
            gate="identity",
            bias=cut.constant,
            norm="none",
            residual=False,
        )
        # All weights are overwritten: the caller's random numbers stay where they are.
        with torch.random.fork_rng(devices=[]):
            model = cls(sizes)
        for parameter in model.parameters():
            parameter.zero_()
        _fill(model.embed.weight, cut.read[:, :n_inputs])
        if cut.constant:
            _fill(model.embed.bias[:, None], cut.read[:, n_inputs:])
        for layer, core in zip(model.layers, cut.cores, strict=True):
            assert isinstance(layer, GatedLayer)
            _fill(layer.W_L, core.left)
            _fill(layer.W_R, core.right)
            _fill(layer.W_D, core.out)
        _fill(model.unembed.weight, torch.eye(n_classes))
        return model.eval()

    @detached
    def accuracy(
        self,
        x: Float[Tensor, "samples n_inputs"],
        labels: Int[Tensor, " samples"],
        batch_size: Count = 8192,
    ) -> float:
        """Return the share of samples, on any device, whose largest logit is their label's."""
        check_labels(labels, self.config.n_classes)
        right = 0
        for batch, targets in zip(x.split(batch_size), labels.split(batch_size), strict=True):
            with evaluating(self):
                logits = self(fit_input(batch, self.embed.weight, constant=False))
            # The largest of NaNs is a class too.
            check_finite(logits=logits)
            right += int((logits.argmax(-1) == targets.to(self.device)).sum())
        return right / len(labels)


def _fill(weight: Tensor, part: Tensor) -> None:
    """Write a smaller matrix into the upper left corner."""
    weight[: part.shape[0], : part.shape[1]] = part.to(weight)
