"""The states of layers that carry one from token to token, kept for sequences that are generated.

A sequence's state has the same bytes however long it is: the sums of a scan, and the inputs of the convolution that its
next tokens see. A pass reads the stored states, and its new states are stored by `keep`, so that a pass that raised can
be repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.model.config import ModelConfig


@dataclass(frozen=True)
class LayerState:
    """The state of some sequences in one layer."""

    inputs: Float[Tensor, "sequence conv_width_less_1 channels"]
    """The last inputs of the convolution."""
    sums: Float[Tensor, "sequence heads state_size head_dim"]
    """The state of the scan, in fp32 or wider."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.inputs.nbytes + self.sums.nbytes


class RecurrentStates:
    """The states of `n_slots` sequences in all layers that have one."""

    def __init__(self, config: ModelConfig, n_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        inputs = n_slots, config.conv_width - 1, config.state_channels
        sums = n_slots, config.resolved_state_heads, config.state_size, config.state_head_dim
        wide = torch.promote_types(dtype, torch.float32)
        self.held = {
            layer: LayerState(
                torch.zeros(inputs, dtype=dtype, device=device), torch.zeros(sums, dtype=wide, device=device)
            )
            for layer, mixer in enumerate(config.layer_mixers)
            if mixer != "attention"
        }
        self.device = device
        self.nbytes = sum(state.nbytes for state in self.held.values())

    def extend(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        counts: Sequence[int],
        n_new: int,
        documents: Int[Tensor, "batch new"] | None = None,
        document_before: Int[Tensor, " batch"] | None = None,
        *,
        at_once: bool = False,
    ) -> "StatePass":
        """A pass over n_new tokens of sequences in those slots, of which the first counts[b] are no padding.

        lengths[b] tokens of a sequence came before; before the first the state is zeros, whatever its slot holds. What
        the pass leaves is held when its `keep` is called or, `at_once`, as soon as a layer is computed.
        """
        return StatePass(self, slots, lengths, counts, n_new, documents, document_before, at_once)


class StatePass:
    """The states before a pass, and those that it leaves."""

    def __init__(
        self,
        states: RecurrentStates,
        slots: Sequence[int],
        lengths: Sequence[int],
        counts: Sequence[int],
        n_new: int,
        documents: Int[Tensor, "batch new"] | None,
        document_before: Int[Tensor, " batch"] | None,
        at_once: bool,
    ) -> None:
        self._states, self._n_new, self._at_once = states, n_new, at_once
        self._lengths, self._counts = lengths, counts
        self.documents, self.document_before = documents, document_before
        self._slots = torch.tensor(slots, device=states.device)
        self._left: dict[int, LayerState] = {}

    @cached_property
    def counts(self) -> Int[Tensor, " batch"]:
        """The tokens of each sequence that are not padding."""
        return torch.tensor(self._counts, device=self._states.device)

    @cached_property
    def real(self) -> Bool[Tensor, "batch new"] | None:
        """True for tokens that are not padding; None if none is."""
        if min(self._counts) == self._n_new:
            return None
        return torch.arange(self._n_new, device=self._states.device) < self.counts[:, None]

    def before(self, layer: int) -> LayerState:
        """The state of each sequence before the pass."""
        held = self._states.held[layer]
        inputs, sums = held.inputs[self._slots], held.sums[self._slots]
        if min(self._lengths) == 0:
            new = torch.tensor(self._lengths, device=self._states.device) == 0
            inputs, sums = inputs.masked_fill(new[:, None, None], 0), sums.masked_fill(new[:, None, None, None], 0)
        return LayerState(inputs, sums)

    def leave(self, layer: int, inputs: Tensor, sums: Tensor) -> None:
        """Note what the pass leaves in a layer."""
        self._left[layer] = LayerState(inputs, sums)
        if self._at_once:
            self.keep()
            self._left.clear()

    def keep(self, rows: Sequence[int] | None = None, slots: Sequence[int] | None = None) -> None:
        """Store the states that the pass left: those of its sequences `rows` in the given slots; None stores each in
        its own slot."""
        to = self._slots if slots is None else torch.tensor(slots, device=self._states.device)
        for layer, left in self._left.items():
            held = self._states.held[layer]
            of = slice(None) if rows is None else list(rows)
            held.inputs[to] = left.inputs[of].to(held.inputs.dtype)
            held.sums[to] = left.sums[of].to(held.sums.dtype)
