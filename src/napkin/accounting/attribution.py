"""Attributes each call of a step to a module and to a component of the model.

The forward pass records which module created which autograd node, and the backward pass looks it up. A node gets its
sequence number just before its operator runs, and keeps it. An operator that creates no node sees the number of the
last node created. Operators of compiled programs carry their own origin (`Origin`).
"""

from collections.abc import Hashable
from typing import no_type_check

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr  # pyright: ignore[reportMissingImports]

from napkin.accounting.compiled.listening import Origin
from napkin.accounting.ledger import Component, Phase, Word, component_of


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
class Attribution:
    """The modules of a model, those that run, and the autograd nodes that they made."""

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(child): _plain(name) for name, child in module.named_modules()}
        self.words = {path: _words(module, path) for path in self.paths.values()}
        self.stack: list[str] = []
        """Paths of the modules that run, the innermost last."""
        self.after_head = False
        """True once the head has run in this forward pass."""
        self.path_of_node: dict[int, str] = {}
        self.component_of_node: dict[Hashable, Component] = {}
        self.nodes_of_activations: set[Hashable] = set()

    def enter(self, module: nn.Module) -> None:
        """Note that the forward pass of `module` begins."""
        self.stack.append(self.paths.get(id(module), type(module).__name__))

    def leave(self) -> None:
        """Note that the innermost module has ended."""
        self.stack.pop()

    def module_path(self, phase: Phase, origin: Origin | None = None) -> str:
        """Path of the innermost module that a call belongs to."""
        if origin is not None and origin.phase:
            return self._path_in_program(origin)
        if phase == "backward":
            return self.path_of_node.get(_current_node(), "")
        path = self.stack[-1] if self.stack else ""
        if phase in ("forward", "recompute"):
            self.path_of_node.setdefault(_get_sequence_nr() - 1, path)
        return path

    def _path_in_program(self, origin: Origin) -> str:
        """A program knows modules from the one that was compiled on; the one program may serve several layers."""
        if origin.phase == "forward":
            around = self.stack[-1] if self.stack else ""
            self.path_of_node.setdefault(_get_sequence_nr() - 1, around)
        else:
            around = self.path_of_node.get(_current_node(), "")
        path = f"{around}.{origin.module}" if around and origin.module else around or origin.module
        # A function that was compiled may name the whole model.
        return path if path in self.words or origin.module not in self.words else origin.module

    def component(
        self, path: str, phase: Phase, *, contraction: bool, of_activations: bool, origin: Origin | None = None
    ) -> Component:
        """The component of a call; a gradient belongs to that of what it is the gradient of."""
        if phase == "optimizer":
            return "optimizer"
        if phase == "backward" and (origin is None or origin.node in self.component_of_node):
            return self.component_of_node.get(_node(origin), "other")
        component = component_of(
            self.words.get(path) or ((path, path),),
            contraction=contraction,
            of_activations=of_activations,
            after_head=self.after_head and not path,
        )
        self.after_head |= component == "head"
        node = _node(origin) if origin is not None else _get_sequence_nr() - 1
        # The first of a node's calls may be a reshape.
        if self.component_of_node.get(node, "other") == "other":
            self.component_of_node[node] = component
        return component

    def mark_node_of_activations(self, origin: Origin | None = None) -> None:
        """Note that the node that is being made multiplies activations."""
        self.nodes_of_activations.add(_get_sequence_nr() - 1 if origin is None else origin.node)

    def is_node_of_activations(self, origin: Origin | None = None) -> bool:
        """True if the node whose backward pass runs was marked as one that multiplies activations."""
        return _node(origin) in self.nodes_of_activations


def _words(root: nn.Module, path: str) -> tuple[Word, ...]:
    """Name and class of the module at `path` and of those around it, the innermost first."""
    names = path.split(".") if path else []
    kinds = [type(root)]
    for name in names:
        root = getattr(root, name)
        kinds.append(type(root))
    return tuple(zip(reversed(["", *names]), (kind.__name__ for kind in reversed(kinds)), strict=True))


def _current_node() -> int:
    """The number of the autograd node that runs; -1 outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def _node(origin: Origin | None) -> Hashable:
    """The autograd node that runs, or the operator of a program that stands for one."""
    return _current_node() if origin is None else origin.node


def _plain(path: str) -> str:
    """A module's path without what torch.compile adds to it."""
    return ".".join(name for name in path.split(".") if name != "_orig_mod")
