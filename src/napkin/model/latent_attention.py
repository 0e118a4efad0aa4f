"""Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads are computed from one narrow
vector. For a token x, in the notation of the paper's section 2.1:

    c = norm(W_DKV · x), the latent, and r = rotate(W_KR · x), which is a part of every head's key
    k_h = [W_UK,h · c; r],  v_h = W_UV,h · c
    q_h = [W_UQ,h · cq; rotate(W_QR,h · cq)]  with  cq = norm(W_DQ · x), or x itself

A cache holds c and r. Since q · (W_UK · c) = (W_UKᵀ · q) · c, a decode step compares queries with the latents
themselves, as if all heads shared one key and one value, and multiplies what it mixed by W_UV: the absorbed form.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from napkin.kernels.attention.decode import Slots
from napkin.model.attention import ForwardContext, PlainAttention, own_context
from napkin.model.layers import Linear, LinearFactory

Stream = Float[Tensor, "batch position d_model"]
Heads = Float[Tensor, "batch position heads head_dim"]
Latents = Float[Tensor, "batch_or_block 1 key latent"]


class LatentAttention(nn.Module):
    """Attention whose keys and values are computed from a latent vector per token.

    `plain_dim` and `rotated_dim` are the widths of the parts of a query or key, `kv_rank` and `query_rank` those of the
    latents; without a `query_rank` the queries are computed from the input.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        kv_rank: int,
        query_rank: int | None,
        plain_dim: int,
        rotated_dim: int,
        value_dim: int,
        attend: PlainAttention,
        rotate: Callable[..., Tensor],
        make_norm: Callable[[int], nn.Module],
        linears: LinearFactory,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.kv_rank, self.query_rank = kv_rank, query_rank
        self.plain_dim, self.rotated_dim, self.value_dim = plain_dim, rotated_dim, value_dim
        self.attend = attend
        self.rotate = rotate
        self.gather: Callable[[Tensor], Tensor] = _whole
        """Makes whole sequences of the input; tensor parallelism replaces it."""
        stacked = (kv_rank, rotated_dim) if query_rank is None else (query_rank, kv_rank, rotated_dim)
        self.latents = linears.linear(d_model, *stacked)
        self.query_norm = None if query_rank is None else make_norm(query_rank)
        self.key_value_norm = make_norm(kv_rank)
        self.query = linears.linear(query_rank or d_model, n_heads * (plain_dim + rotated_dim))
        self.key_value = linears.linear(kv_rank, n_heads * (plain_dim + value_dim))
        self.output = linears.residual_output(n_heads * value_dim, d_model)

    def forward(self, x: Stream, context: ForwardContext | None = None) -> Stream:
        """Attend, with the rotation and mask of `context`; without one, from position 0 in one document."""
        x = self.gather(x)
        context = own_context(self, x, self.rotated_dim) if context is None else context
        queries, latent, shared = self._queries_and_latents(x, context)
        cache, mask = context.cache, context.mask
        if cache is None:
            mixed = self._attend_expanded(queries, latent, shared, mask)
        else:
            new = torch.cat((latent, shared), dim=-1)[:, None]
            held, _ = cache.update(context.layer, new, new[..., :0])
            if isinstance(mask, Slots) or self._absorbs(x.shape[1], held.shape[2]):
                mixed = self._attend_absorbed(queries, held, mask)
            else:
                latent, shared = held[:, 0].split((self.kv_rank, self.rotated_dim), dim=-1)
                mixed = self._attend_expanded(queries, latent, shared, mask)
        return self.output(rearrange(mixed, "b h t c -> b t (h c)"))

    def _queries_and_latents(
        self, x: Stream, context: ForwardContext
    ) -> tuple[Heads, Float[Tensor, "batch position rank"], Float[Tensor, "batch position rotated"]]:
        """Queries, latents, and the parts of keys that heads share; rotated."""
        made = self.latents(x)
        read = x
        if self.query_norm is not None:
            kept = self.kv_rank + self.rotated_dim
            low, made = made.split((made.shape[-1] - kept, kept), dim=-1)
            read = self.query_norm(low)
        latent, shared = made.split((self.kv_rank, self.rotated_dim), dim=-1)
        queries = rearrange(self.query(read), "b t (h c) -> b t h c", h=self.n_heads)
        plain, turned = queries.split((self.plain_dim, self.rotated_dim), dim=-1)
        # Queries and the shared key are concatenated and rotated in one pass.
        turned = self.rotate(torch.cat((turned, shared[:, :, None]), dim=2), *context.rotation)
        turned, shared = turned.split((self.n_heads, 1), dim=2)
        return torch.cat((plain, turned), dim=-1), self.key_value_norm(latent), shared[:, :, 0]

    def _attend_expanded(
        self,
        queries: Heads,
        latent: Float[Tensor, "batch key rank"],
        shared: Float[Tensor, "batch key rotated"],
        mask: object,
    ) -> Float[Tensor, "batch heads position value_dim"]:
        """The keys and values of all heads are made, and attended to as any others."""
        made = rearrange(self.key_value(latent), "b t (h c) -> b t h c", h=self.n_heads)
        plain, values = made.split((self.plain_dim, self.value_dim), dim=-1)
        keys = torch.cat((plain, shared[:, :, None].expand(-1, -1, self.n_heads, -1)), dim=-1)
        queries, keys, values = (rearrange(part, "b t h c -> b h t c") for part in (queries, keys, values))
        missing = keys.shape[-1] - self.value_dim if self.attend.one_width else 0
        if not missing:
            return self.attend(queries, keys, values, mask)
        if missing < 0:
            queries, keys = (nn.functional.pad(each, (0, -missing)) for each in (queries, keys))
        else:
            values = nn.functional.pad(values, (0, missing))
        return self.attend(queries, keys, values, mask)[..., : self.value_dim]

    def _attend_absorbed(
        self, queries: Heads, held: Latents, mask: object
    ) -> Float[Tensor, "batch heads position value_dim"]:
        """Queries are compared with the latents, which are the values too."""
        layer = self.key_value
        # A quantized layer has no adapter.
        matrix = layer.matrix if isinstance(layer, Linear) else layer.weight
        of_heads = matrix.to(queries.dtype).view(self.n_heads, self.plain_dim + self.value_dim, self.kv_rank)
        to_keys, to_values = of_heads.split((self.plain_dim, self.value_dim), dim=1)
        plain, turned = rearrange(queries, "b t h c -> b h t c").split((self.plain_dim, self.rotated_dim), dim=-1)
        absorbed = torch.cat((plain @ to_keys, turned), dim=-1)
        # Where keys are read from their slots, values are as wide: what it mixes of the shared keys is left out.
        whole = isinstance(mask, Slots) or self.attend.one_width
        mixed = self.attend(absorbed, held, held if whole else held[..., : self.kv_rank], mask)[..., : self.kv_rank]
        return mixed @ to_values.transpose(1, 2)

    def _absorbs(self, n_queries: int, n_keys: int) -> bool:
        """True if the absorbed form takes fewer products than making the keys and values of all that is held."""
        a_latent, a_head = self.kv_rank * (self.plain_dim + self.value_dim), self.plain_dim + self.rotated_dim
        absorbed = n_queries * (a_latent + n_keys * (2 * self.kv_rank + self.rotated_dim))
        return n_queries == 1 or absorbed < n_keys * (a_latent + n_queries * (a_head + self.value_dim))


def _whole(x: Tensor) -> Tensor:
    """x unchanged: each rank holds whole sequences."""
    return x
