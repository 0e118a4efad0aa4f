"""Structured pruning: the heads, hidden units, channels and layers that matter least on a text are removed, which
leaves a smaller model of the same kind with the remaining weights.

Importance is measured on tokens that stand for those the model will read, in one pass. A group of heads is a head of
keys and values with the query heads that read it. A unit (a group of heads, or a hidden unit of a feed-forward layer)
writes one summand of what its layer adds to the residual stream, and its importance is

    activation   the mean over tokens of the length of that summand, as in Minitron (Muralidharan et al. 2024), which
                 has the activation before the output matrix: |W (x - x without the unit)|
    taylor       the mean over sequences of (d loss / d m)², where m = 1 multiplies the summand: the square of what
                 the loss would change by without the unit, to first order (Molchanov et al. 2019)

That of a channel, one of the d_model numbers of the residual stream, is of what reads the stream, the matrices of each
layer and the head: the mean over tokens and readers of |what is read of the channel|, which is Minitron's, or its slope
with one m for all readers. That of a layer is 1 - cos(residual stream before it, after it), the mean over tokens:
ShortGPT's block influence (Men et al. 2024). All layers keep equally many units, because a config has one size for all,
each its own; a channel goes from all layers.

Root-mean-square norms divide by the mean over fewer channels where some are removed: gains are multiplied by
sqrt(d / d_kept), and norm_eps by d / d_kept, so that channels which are zero leave without a trace.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.model.attention import CausalSelfAttention
from napkin.model.config import ModelConfig
from napkin.model.config_checks import same_pattern
from napkin.model.feed_forward import FeedForward, GatedFeedForward
from napkin.model.layers import Linear, MuPLinear
from napkin.model.transformer import Transformer, evaluation_mode

Measure = Literal["activation", "taylor"]
Batches = Sequence[Int[Tensor, "_ position"]]


@dataclass(frozen=True)
class PrunedSizes:
    """The sizes of a smaller model; None keeps that of the larger one."""

    n_layers: int | None = None
    n_kv_heads: int | None = None
    """Groups of heads of each layer."""
    d_ff: int | None = None
    """Hidden units of each feed-forward layer."""
    d_model: int | None = None
    """Channels of the residual stream."""

    def check(self, config: ModelConfig) -> None:
        """Raise NapkinError for a size that is out of range, and for parts that cannot be removed by themselves."""
        limits = {
            "n_layers": config.n_layers,
            "n_kv_heads": config.resolved_n_kv_heads,
            "d_ff": config.resolved_d_ff,
            "d_model": config.d_model,
        }
        for name, most in limits.items():
            size = getattr(self, name)
            if size is not None and not 1 <= size <= most:
                raise NapkinError(f"{name} is {size}, the model has {most}: keep 1 to {most}")
        if all(getattr(self, name) in (None, most) for name, most in limits.items()):
            raise NapkinError("nothing is to be removed: keep fewer than all of n_layers, n_kv_heads, d_ff or d_model")
        for name in ("n_layers", "n_kv_heads"):
            if getattr(self, name) not in (None, limits[name]) and config.kv_sharing > 1:
                raise NapkinError(
                    f"{name} is {getattr(self, name)}, and groups of {config.kv_sharing} layers share keys and values: "
                    "prune d_ff"
                )
        if self.n_kv_heads is not None:
            why = {
                "latent attention makes all heads of one vector": config.kv_lora_rank is not None,
                "layers with a state have heads of another kind": config.has_states,
                "qk_norm 'all_heads' norms all heads together": config.qk_norm == "all_heads",
                "positions 'alibi' give each head a slope by its number": config.positions == "alibi",
            }
            for reason, holds in why.items():
                if holds:
                    raise NapkinError(
                        f"n_kv_heads is {self.n_kv_heads}, and {reason}: heads cannot be removed, prune layers or d_ff"
                    )
        if self.d_ff is not None and config.n_experts:
            raise NapkinError(
                f"d_ff is {self.d_ff}, and the model has {config.n_experts} experts, whose routers were trained with "
                "all their units: prune layers or heads"
            )
        if self.d_model not in (None, config.d_model):
            why = {
                "layer norms subtract the mean of all channels": config.norm == "layer",
                "sinusoidal positions are numbers of all channels": config.positions == "sinusoidal",
                "µP's multipliers are of the width": config.mup_base_d_model is not None,
                "latent attention has norms between its matrices": config.kv_lora_rank is not None,
                "layers with a state are of the width": config.has_states,
                "routers of experts were trained with all channels": bool(config.n_experts),
            }
            for reason, holds in why.items():
                if holds:
                    raise NapkinError(f"d_model is {self.d_model}, and {reason}: prune layers, heads or d_ff")


@dataclass(frozen=True)
class Importance:
    """The importance of a model's parts, in float32: sums in another order of batches round to the same numbers."""

    layers: Float[Tensor, " layer"]
    kv_heads: dict[int, Float[Tensor, " kv_head"]]
    """Importance of the groups of heads, by layer, where it has attention of the ordinary kind."""
    hidden_units: dict[int, Float[Tensor, " unit"]]
    """Importance of the hidden units, by layer, where it has one feed-forward layer for all tokens."""
    channels: Float[Tensor, " d_model"]


@dataclass(frozen=True)
class Kept:
    """The parts that stay, by their numbers in the larger model, in ascending order."""

    layers: tuple[int, ...]
    kv_heads: dict[int, tuple[int, ...]]
    """Groups of heads that stay, by layer of the larger model; empty where all stay."""
    hidden_units: dict[int, tuple[int, ...]]
    channels: tuple[int, ...] = ()
    """Channels of the residual stream that stay; empty where all stay."""


def prune(model: Transformer, batches: Batches, sizes: PrunedSizes, by: Measure = "activation") -> Transformer:
    """Return a smaller model, which has the most important parts of this one on those tokens.

    Raises NapkinError for sizes that are not possible, and where no config has the kept layers' windows.
    """
    sizes.check(model.config)
    importance = measure_importance(model, batches, by)
    return remove_parts(model, most_important(importance, model.config, sizes))


def measure_importance(
    model: Transformer,
    batches: Batches,
    by: Measure = "activation",
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Importance:
    """Measure the importance of all parts on tokens; batches may come in any order and be of any size."""
    influence, heads, units = _Influence(model), {}, {}
    for layer, block in enumerate(model.blocks):
        attention, feed_forward = getattr(block, "attention", None), getattr(block, "feed_forward", None)
        if isinstance(attention, CausalSelfAttention):
            heads[layer] = _SCORES[by](attention.output, attention.n_kv_heads)
        if isinstance(feed_forward, (FeedForward, GatedFeedForward)):
            units[layer] = _SCORES[by](feed_forward.down, feed_forward.down.weight.shape[1])
    needs_gradient = by == "taylor"
    channels = _Channels(model, needs_gradient=needs_gradient)
    scores = [*heads.values(), *units.values(), channels]
    required = [(each, each.requires_grad) for each in model.parameters()]
    try:
        # Only what multiplies the summands needs a gradient.
        model.requires_grad_(False)
        with evaluation_mode(model), torch.set_grad_enabled(needs_gradient), influence, _all_entered(scores):
            for done, tokens in enumerate(batches):
                progress(done, len(batches))
                channels.begin(len(tokens))
                hidden = channels.seen(model.hidden(tokens))
                if needs_gradient:
                    loss = model.loss_of(hidden[:, :-1], tokens[:, 1:])
                    # The batch's loss is a mean: times the sequences it is the sum of their losses.
                    gradients = torch.autograd.grad(loss * len(tokens), [each.multiplier for each in scores])
                    for each, gradient in zip(scores, gradients, strict=True):
                        each.add(gradient[:, 0].double().square().sum(0), len(tokens))
    finally:
        for parameter, was in required:
            parameter.requires_grad_(was)
    progress(len(batches), len(batches))
    return Importance(
        influence.mean,
        {layer: each.mean for layer, each in heads.items()},
        {layer: each.mean for layer, each in units.items()},
        channels.mean,
    )


class _Scores:
    """The sums of the scores of units whose numbers a matrix reads, while it is entered."""

    multiplier: Tensor

    def __init__(self, output: Linear, n_units: int) -> None:
        self.output, self.n_units = output, n_units
        self.sums = torch.zeros(n_units, dtype=torch.float64, device=output.weight.device)
        self.n = 0

    def __enter__(self) -> None:
        self._hook = self.output.register_forward_pre_hook(self.read)

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def add(self, sums: Tensor, n: int) -> None:
        self.sums += sums
        self.n += n

    @property
    def mean(self) -> Tensor:
        return (self.sums / max(self.n, 1)).float().cpu()

    def read(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        raise NotImplementedError


class _Lengths(_Scores):
    """Lengths of what each unit writes into the residual stream."""

    def read(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)
        weight = self.output.matrix * (self.output.multiplier if isinstance(self.output, MuPLinear) else 1.0)
        width = x.shape[1] // self.n_units
        if width == 1:
            self.add(x.abs().double().sum(0) * weight.double().norm(dim=0), len(x))
            return
        written = [
            F.linear(own, matrix).norm(dim=1).double().sum()
            for own, matrix in zip(x.split(width, dim=1), weight.split(width, dim=1), strict=True)
        ]
        self.add(torch.stack(written), len(x))


class _Slopes(_Scores):
    """Multiplies each unit's numbers by 1, of which the loss has a gradient for each sequence."""

    def read(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = inputs[0]
        self.multiplier = x.new_ones(len(x), 1, self.n_units).requires_grad_()
        return (x * self.multiplier.repeat_interleave(x.shape[-1] // self.n_units, dim=-1),)


class _Channels(_Scores):
    """Scores of the channels of the residual stream, of what its readers read."""

    def __init__(self, model: Transformer, *, needs_gradient: bool) -> None:
        parts = (getattr(block, part, None) for block in model.blocks for part in ("attention", "feed_forward"))
        self.readers = [
            reader
            for part in parts
            for name in ("query_key_value", "query", "gate_up", "up")
            if isinstance(reader := getattr(part, name, None), Linear)
        ]
        self.sums = torch.zeros(model.config.d_model, dtype=torch.float64, device=model.device)
        self.needs_gradient, self.n = needs_gradient, 0

    def __enter__(self) -> None:
        self._hooks = [each.register_forward_pre_hook(self.read) for each in self.readers]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, n_sequences: int) -> None:
        """Prepare for a batch."""
        size = (n_sequences, 1, len(self.sums))
        self.multiplier = torch.ones(size, device=self.sums.device, requires_grad=self.needs_gradient)

    def read(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (self.seen(inputs[0]),)

    def seen(self, x: Tensor) -> Tensor:
        """The input of a reader, whose channels are scored."""
        if self.needs_gradient:
            return x * self.multiplier.to(x.dtype)
        self.add(x.abs().double().flatten(0, -2).sum(0), x[..., 0].numel())
        return x


_SCORES: dict[Measure, type[_Scores]] = {"activation": _Lengths, "taylor": _Slopes}


class _Influence:
    """Sums of 1 - cos of the residual stream before and after each block, while it is entered."""

    def __init__(self, model: Transformer) -> None:
        self.blocks = model.blocks
        self.sums, self.n = torch.zeros(len(model.blocks), dtype=torch.float64), 0

    def __enter__(self) -> None:
        self._hooks = [block.register_forward_hook(self._reading(n)) for n, block in enumerate(self.blocks)]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _reading(self, number: int) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def read(block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            before, after = inputs[0].detach().double(), output.detach().double()
            self.sums[number] += (1 - F.cosine_similarity(before, after, dim=-1)).sum().cpu()
            self.n += before[..., 0].numel() if number == 0 else 0

        return read

    @property
    def mean(self) -> Tensor:
        return (self.sums / max(self.n, 1)).float()


@contextmanager
def _all_entered(contexts: Sequence[_Scores]) -> Iterator[None]:
    entered: list[_Scores] = []
    try:
        for each in contexts:
            each.__enter__()
            entered.append(each)
        yield
    finally:
        for each in entered:
            each.__exit__()


def most_important(importance: Importance, config: ModelConfig, sizes: PrunedSizes) -> Kept:
    """Return the most important parts; of equal ones the first stay. Raises NapkinError for impossible sizes."""
    sizes.check(config)

    def best(scores: Tensor, n: int) -> tuple[int, ...]:
        return tuple(sorted(scores.argsort(descending=True, stable=True)[:n].tolist()))

    return _kept(config, sizes, importance, best)


def drawn_parts(config: ModelConfig, sizes: PrunedSizes, seed: int = 0) -> Kept:
    """Return parts that are drawn evenly, as a baseline. Raises NapkinError for impossible sizes."""
    sizes.check(config)
    generator = torch.Generator().manual_seed(seed)

    def draw(parts: Tensor, n: int) -> tuple[int, ...]:
        return tuple(sorted(torch.randperm(len(parts), generator=generator)[:n].tolist()))

    layers, heads, units, channels = map(
        torch.arange, (config.n_layers, config.resolved_n_kv_heads, config.resolved_d_ff, config.d_model)
    )
    every = range(config.n_layers)
    parts = Importance(
        layers.float(), dict.fromkeys(every, heads.float()), dict.fromkeys(every, units.float()), channels.float()
    )
    return _kept(config, sizes, parts, draw)


def _kept(
    config: ModelConfig,
    sizes: PrunedSizes,
    parts: Importance,
    choose: Callable[[Tensor, int], tuple[int, ...]],
) -> Kept:
    n_layers = sizes.n_layers or config.n_layers
    chosen = tuple(range(config.n_layers)) if n_layers == config.n_layers else choose(parts.layers, n_layers)

    def within(units: dict[int, Tensor], size: int | None, most: int) -> dict[int, tuple[int, ...]]:
        return {n: choose(units[n], size) for n in chosen} if size not in (None, most) else {}

    return Kept(
        chosen,
        within(parts.kv_heads, sizes.n_kv_heads, config.resolved_n_kv_heads),
        within(parts.hidden_units, sizes.d_ff, config.resolved_d_ff),
        choose(parts.channels, sizes.d_model) if sizes.d_model not in (None, config.d_model) else (),
    )


def pruned_config(config: ModelConfig, kept: Kept) -> ModelConfig:
    """Return the config of a model of those parts. Raises NapkinError where none has the kept layers' windows."""
    changes: dict[str, Any] = {"n_layers": len(kept.layers)}
    if len(kept.layers) < config.n_layers:
        mixers = [config.layer_mixers[layer] for layer in kept.layers]
        changes |= {"mixers": same_pattern(mixers), **_windows(config, kept.layers)}
        changes["n_dense_layers"] = sum(layer < config.n_dense_layers for layer in kept.layers)
        if config.n_experts and changes["n_dense_layers"] == len(kept.layers):
            raise NapkinError(f"layers {_listed(kept.layers)} have no experts: keep more of the {config.n_layers}")
    if kept.kv_heads:
        n_kv_heads = len(next(iter(kept.kv_heads.values())))
        changes |= {
            "n_heads": n_kv_heads * (config.n_heads // config.resolved_n_kv_heads),
            "n_kv_heads": n_kv_heads,
            "head_dim": config.resolved_head_dim,
        }
    if kept.hidden_units:
        changes["d_ff"] = len(next(iter(kept.hidden_units.values())))
    if kept.channels:
        # Sizes that would follow from the width keep their values.
        followed: dict[str, Any] = {
            "head_dim": config.resolved_head_dim,
            "d_ff": config.resolved_d_ff,
            "embedding_scale": config.resolved_embedding_scale,
        }
        norm_eps = config.norm_eps * config.d_model / len(kept.channels)
        changes = followed | changes | {"d_model": len(kept.channels), "norm_eps": norm_eps}
    return dataclasses.replace(config, **changes)


def _windows(config: ModelConfig, layers: tuple[int, ...]) -> dict[str, int | None]:
    """The config fields with which the kept layers see the same tokens as before."""
    wanted = [config.attention_windows[layer] for layer in layers]
    if not any(wanted):
        return {"attention_window": None, "full_attention_every": None}
    for every in (None, *range(2, len(layers) + 1)):
        pruned = dataclasses.replace(config, n_layers=len(layers), n_dense_layers=0, full_attention_every=every)
        if pruned.attention_windows == wanted:
            return {"full_attention_every": every}
    raise NapkinError(
        f"of layers {_listed(layers)} some have a window of {config.attention_window} tokens, in a pattern that no "
        "config has: keep another number of layers, or prune heads or d_ff"
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


@torch.no_grad()
def remove_parts(model: Transformer, kept: Kept) -> Transformer:
    """Return a new model of the remaining parts, on the same device and in the same dtype, in evaluation mode."""
    config = model.config
    smaller = Transformer(pruned_config(config, kept), device=model.device, dtype=model.head_weight.dtype)
    weights = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, own in smaller.state_dict().items():
        weight, part = weights.get(name), name
        if name.startswith("blocks."):
            _, number, part = name.split(".", 2)
            layer = kept.layers[int(number)]
            weight = weights[f"blocks.{layer}.{part}"]
            if layer in kept.kv_heads:
                weight = _of_heads(weight, part, config, kept.kv_heads[layer])
            if layer in kept.hidden_units:
                weight = _of_units(weight, part, kept.hidden_units[layer])
        assert weight is not None, name
        if kept.channels:
            weight = _of_channels(weight, part, config, kept.channels)
        assert weight.shape == own.shape, name
        tensors[name] = weight
    smaller.load_state_dict(tensors)
    return smaller.eval()


def _of_heads(weight: Tensor, part: str, config: ModelConfig, kept: tuple[int, ...]) -> Tensor:
    """The rows or columns of those groups of heads."""
    if part not in ("attention.query_key_value.weight", "attention.query_key_value.bias", "attention.output.weight"):
        return weight
    n_kv_heads, head_dim = config.resolved_n_kv_heads, config.resolved_head_dim
    group = config.n_heads // n_kv_heads * head_dim
    places = torch.tensor(kept, device=weight.device)
    if part == "attention.output.weight":
        return weight.unflatten(1, (n_kv_heads, group))[:, places].flatten(1)
    rows = weight.split((n_kv_heads * group, n_kv_heads * head_dim, n_kv_heads * head_dim))
    return torch.cat([each.unflatten(0, (n_kv_heads, -1))[places].flatten(0, 1) for each in rows])


def _of_units(weight: Tensor, part: str, kept: tuple[int, ...]) -> Tensor:
    """The rows or columns of those hidden units; a gate is stacked above the up projection."""
    places = torch.tensor(kept, device=weight.device)
    if part == "feed_forward.down.weight":
        return weight[:, places]
    if part.startswith("feed_forward.gate_up."):
        return torch.cat([half[places] for half in weight.chunk(2)])
    return weight[places] if part.startswith("feed_forward.up.") else weight


_READ = {
    *("embedding.weight", "positions.weight", "head.weight", "attention.query_key_value.weight"),
    *("attention.query.weight", "feed_forward.gate_up.weight", "feed_forward.up.weight"),
}
"""Matrices with a column per channel."""
_WRITTEN = {
    *("attention.output.weight", "attention.output.bias", "feed_forward.down.weight", "feed_forward.down.bias"),
}
"""Matrices and biases with a row per channel."""


def _of_channels(weight: Tensor, part: str, config: ModelConfig, kept: tuple[int, ...]) -> Tensor:
    """The rows or columns of those channels; the gain of a norm makes up for the mean over fewer of them."""
    places = torch.tensor(kept, device=weight.device)
    if part in _READ:
        return weight[:, places]
    if part in _WRITTEN:
        return weight[places]
    if part.endswith("norm.gain") and "qk_norm" not in part:
        return weight[places] * (config.d_model / len(kept)) ** 0.5
    return weight
