"""Expert parallelism: ranks that split the batch split the experts too (Lepikhin et al. 2020).

Each rank routes its own tokens, sends each assignment to the rank of its expert and receives the expert's output: two
all-to-alls in the forward pass, two in the backward pass. So a rank's experts see the tokens of all ranks of its group:
their gradients are sums over the group, and are added up over the groups, which are replicas of each other.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from napkin.distributed.process_group import all_reduce_together, all_to_all, in_products_dtype
from napkin.distributed.ranks import combined, flattened
from napkin.model.feed_forward import CapacityExperts, DroplessExperts, Experts
from napkin.model.transformer import Transformer
from napkin.optim.saved_state import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def divide_experts(model: Transformer, mesh: "DeviceMesh", *, token_parts: int, sharded: bool) -> "DividedExperts":
    """Keep only this rank's experts of a model that every rank holds whole; `mesh` is that of `make_expert_mesh`.

    `token_parts` is the number of ranks whose gradients a step averages. `sharded` is whether FSDP2 will shard the
    experts further. Parameters keep their names.
    """
    owners = mesh["expert"]
    modules: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        exchange = DroplessExchange if isinstance(module, DroplessExperts) else CapacityExchange
        changed = cast(Any, module)
        changed.compute = exchange(changed, owners)
        changed.matrices = functools.partial(_own_matrices, module)
        for name, whole in list(module.named_parameters()):
            own = whole.detach().chunk(owners.size())[owners.get_local_rank()].clone()
            part = DTensor.from_local(own, owners, (Shard(0),), run_check=False)
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        modules.append(module)
    return DividedExperts(modules, mesh, token_parts, sharded=sharded)


def _own_matrices(experts: Experts) -> tuple[Tensor, Tensor]:
    return cast(DTensor, experts.up).to_local(), cast(DTensor, experts.down).to_local()


class DividedExperts:
    """This rank's experts: FSDP2 shards them over replicas, or their gradients are averaged here.

    In both cases the wrappers that average the gradients of other parameters skip them.
    """

    def __init__(self, modules: list[nn.Module], mesh: "DeviceMesh", token_parts: int, *, sharded: bool) -> None:
        self.modules = modules
        self.token_parts = token_parts
        self.mesh: DeviceMesh | None = None
        """The mesh over which FSDP2 shards the experts; with two dimensions, the first is that of its replicas."""
        self.parameters: list[nn.Parameter] = []
        """Parameters that it does not shard."""
        if sharded:
            shards = flattened(mesh, "shards", "context")
            self.mesh = combined(mesh["replicas"], shards) if mesh["replicas"].size() > 1 else shards
        else:
            self.parameters = [parameter for module in modules for parameter in module.parameters()]
        groups = (mesh[name].get_group() for name in ("replicas", "context"))
        self.replicas: list[ProcessGroup] = [group for group in groups if group.size() > 1]

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Add up the gradients of all replicas, and divide them by the number of ranks that computed tokens.

        The losses of these ranks are weighted for a mean over ranks, which the other gradients get. A collective.
        """
        if not self.parameters:
            return
        gradients = [local(cast(Tensor, parameter.grad)) for parameter in self.parameters]
        sums = gradients
        for group in self.replicas:
            sums = all_reduce_together(sums, group)
        for gradient, total in zip(gradients, sums, strict=True):
            torch.div(total, self.token_parts, out=gradient)


class DroplessExchange:
    """Computes rows sorted by expert on the ranks that have the experts."""

    def __init__(self, experts: DroplessExperts, owners: "DeviceMesh") -> None:
        self.compute: Callable[..., Tensor] = experts.compute
        self.group = owners.get_group()

    def __call__(
        self, rows: Float[Tensor, "assignment d_model"], counts: Int[Tensor, " n_experts"]
    ) -> Float[Tensor, "assignment d_model"]:
        """The experts' output for the rows, in the same order; a collective."""
        size, group = self.group.size(), self.group
        # By rank and expert: the rows that this rank sends, then those that it receives for its own experts.
        leaving = counts.view(size, -1)
        coming = all_to_all(leaving, [1] * size, [1] * size, group)
        sent, received = torch.stack((leaving.sum(dim=1), coming.sum(dim=1))).tolist()
        arrived = all_to_all(in_products_dtype(rows), sent, received, group)
        # They are sorted by rank, then by expert.
        experts = torch.arange(coming.shape[1], device=rows.device).repeat(size)
        order = experts.repeat_interleave(coming.flatten(), output_size=len(arrived)).argsort(stable=True)
        outputs = self.compute(arrived.index_select(0, order), coming.sum(dim=0))
        return all_to_all(outputs.index_select(0, order.argsort()), received, sent, group)


class CapacityExchange:
    """Computes each expert's rows, equally many on every rank, on the ranks that have the experts."""

    def __init__(self, experts: CapacityExperts, owners: "DeviceMesh") -> None:
        self.compute: Callable[..., Tensor] = experts.compute
        self.group = owners.get_group()

    def __call__(self, inputs: Float[Tensor, "n_experts room d_model"]) -> Float[Tensor, "n_experts room d_model"]:
        """The experts' output for the rows; a collective."""
        size, group, room = self.group.size(), self.group, inputs.shape[1]
        each = [len(inputs) // size] * size
        arrived = all_to_all(in_products_dtype(inputs), each, each, group).unflatten(0, (size, -1))
        outputs = self.compute(arrived.transpose(0, 1).flatten(1, 2))
        returned = outputs.unflatten(1, (size, room)).transpose(0, 1).flatten(0, 1)
        return all_to_all(returned, each, each, group)
