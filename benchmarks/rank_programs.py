"""Bytes of each rank of programs of others, planned beside metered on gloo ranks of this machine.

    .venv-peers/bin/python benchmarks/rank_programs.py [NAMES ...] [--ranks 2,4] [--write]

Each program is planned by `napkin.plan_program`, then the same functions build it and train it on forked ranks, which
meter steps and take the smallest peak. Printed are the bytes at the peak of each rank, planned and by the allocator's
own events, and in brackets by how much the bytes in tensors are below those: on a processor with products in bf16 the
allocator also has what a product packs for a moment. Names choose programs; those that begin with
"plain" need no other library.
"""

import argparse
import functools
import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import napkin
from napkin.accounting.counting import plain_step
from napkin.accounting.ledger import METERED_STEP
from napkin.accounting.metering import meter_step
from rank_bytes import METERED_STEPS, compared, fork_ranks
from result_files import heading, write_result

VOCABULARY, LENGTH, WIDTH = 256, 32, 64


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def tokens(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (rows, LENGTH))
    return {"input_ids": ids, "labels": ids}


def sharded(model: nn.Module, layers: Any, mesh: DeviceMesh | None = None, **settings: Any) -> nn.Module:
    """Divide each layer, and then the rest of the model, by FSDP2."""
    for layer in layers:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


# Programs of transformers. Each function is one, built on every rank.


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    sizes = {"hidden_size": WIDTH, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, use_cache=False, **sizes))


def with_llama_plan(model: Any, mesh: DeviceMesh) -> None:
    """Divide the products of a Llama by columns and rows."""
    for layer in model.model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh, plan)


def llama_fsdp() -> Any:
    model = llama()
    sharded(model, model.model.layers)
    return model, adamw(model), tokens()


def llama_fsdp_bf16() -> Any:
    model = llama()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded(model, model.model.layers, mp_policy=policy)
    return model, adamw(model), tokens()


def llama_tensor() -> Any:
    model = llama()
    with_llama_plan(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adamw(model), tokens()


def llama_fsdp_tensor() -> Any:
    """Two by two on 4 ranks; on 2, tensor parallelism within FSDP2 of one."""
    model = llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    with_llama_plan(model, mesh["tensor"])
    sharded(model, model.model.layers, mesh["data"])
    return model, adamw(model), tokens()


def mixtral_fsdp() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM  # pyright: ignore[reportMissingImports]

    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, use_cache=False, **sizes)
    model = MixtralForCausalLM(config)
    sharded(model, model.model.layers)
    return model, adamw(model), tokens()


def qwen_moe_fsdp() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # pyright: ignore[reportMissingImports]

    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, use_cache=False, **sizes, **experts
    )
    model = Qwen3MoeForCausalLM(config)
    sharded(model, model.model.layers)
    return model, adamw(model), tokens()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=LENGTH, use_cache=False)
    )


def gpt2_fsdp_accumulated() -> Any:
    """Two micro-batches, whose gradients are reduced with the second."""
    model = gpt2()
    sharded(model, model.transformer.h)

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> None:
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            part = {name: each[2 * number : 2 * number + 2] for name, each in batch.items()}
            (model(**part).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, adamw(model), tokens(4), step


def gpt2_ddp() -> Any:
    model = nn.parallel.DistributedDataParallel(gpt2())
    return model, adamw(model), tokens()


def t5_fsdp() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration  # pyright: ignore[reportMissingImports]

    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, use_cache=False, **sizes)
    )
    sharded(model, [*model.encoder.block, *model.decoder.block])
    return model, adamw(model), tokens()


def vit_fsdp_uneven() -> Any:
    """17 positions and 10 classes, which no two ranks divide evenly."""
    from transformers import ViTConfig, ViTForImageClassification  # pyright: ignore[reportMissingImports]

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 130}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes))
    sharded(model, next(each for each in model.modules() if isinstance(each, nn.ModuleList)))
    return model, adamw(model), {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(10, (4,))}


# Programs that need torch alone.


class Block(nn.Module):
    """Products, and an addition of what came in."""

    def __init__(self, width: int = WIDTH, inner: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Plain(nn.Module):
    """Embedding, blocks, and a head whose loss it returns."""

    def __init__(self, blocks: int = 2, vocabulary: int = 97) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def plain_fsdp_uneven() -> Any:
    model = Plain()
    sharded(model, model.blocks)
    return model, adamw(model), torch.randint(97, (2, LENGTH))


def plain_fsdp_bf16_accumulated() -> Any:
    model = Plain(vocabulary=96)
    sharded(model, model.blocks, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def step(model: Any, optimizer: Any, ids: Tensor) -> None:
        for number, part in enumerate(ids.chunk(3)):
            model.set_requires_gradient_sync(number == 2)
            model(part).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, adamw(model), torch.randint(96, (3, LENGTH)), step


def plain_tensor() -> Any:
    model = Plain()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, adamw(model), torch.randint(97, (2, LENGTH))


def plain_ddp() -> Any:
    model = nn.parallel.DistributedDataParallel(Plain())
    return model, adamw(model), torch.randint(97, (2, LENGTH))


def plain_pipeline() -> Any:
    """A stage on each rank, in the order 1F1B, whose shapes the stages tell each other."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    parts: list[nn.Module] = [Block(), Block()]
    parts = [*([nn.Embedding(VOCABULARY, WIDTH)] if rank == 0 else []), *parts]
    model = nn.Sequential(*parts, *([nn.Linear(WIDTH, VOCABULARY)] if rank == last else []))
    stage = PipelineStage(model, rank, last + 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=_loss_of_rows)

    def step(_: Any, optimizer: Any, ids: Tensor) -> None:
        if rank == 0:
            schedule.step(ids)
        elif rank == last:
            schedule.step(target=ids, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return model, adamw(model), torch.randint(VOCABULARY, (4, LENGTH)), step


def _loss_of_rows(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def plain_experts() -> Any:
    """Each rank has one expert; tokens go there and back in an all-to-all, equally many to each."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    group = dist.group.WORLD

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.expert = nn.Embedding(VOCABULARY, WIDTH), Block()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids).flatten(0, 1)
            there = all_to_all_single_autograd(x, None, None, group)  # pyright: ignore[reportArgumentType]
            back = all_to_all_single_autograd(self.expert(there), None, None, group)  # pyright: ignore[reportArgumentType]
            return (x + back).square().mean()

    model = Experts()
    return model, adamw(model), torch.randint(VOCABULARY, (2, LENGTH))


PROGRAMS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        *(llama_fsdp, llama_fsdp_bf16, llama_tensor, llama_fsdp_tensor, mixtral_fsdp, qwen_moe_fsdp),
        *(gpt2_fsdp_accumulated, gpt2_ddp, t5_fsdp, vit_fsdp_uneven),
        *(plain_fsdp_uneven, plain_fsdp_bf16_accumulated, plain_tensor, plain_ddp, plain_pipeline, plain_experts),
    )
}
IMPORTED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining")


def metered_bytes(build: Callable[[], Any]) -> tuple[int, int]:
    """This rank's peak bytes in a step: those in tensors, and by the allocator's events; the least of several steps.

    gloo sends in threads of its own, which let go of a tensor a moment after the collective is over.
    """
    gc.collect()
    torch.manual_seed(0)
    module, optimizer, batch, *steps = build()
    plain = plain_step(module, lambda _: optimizer)
    run = functools.partial(steps[0], module, optimizer, batch) if steps else functools.partial(plain, module, batch)
    found: list[tuple[int, int]] = []
    for number in range(METERED_STEP + METERED_STEPS):
        if number < METERED_STEP:
            run()
        else:
            measured = meter_step(module, run)
            found.append((measured.ledger.peak_bytes, measured.peak_bytes))
    return min(found)


def run_rank(folder: Path, rank: int, names: list[str]) -> None:
    """Meter all programs on this rank."""
    dist.init_process_group("gloo")
    for name in names:
        (folder / f"{name}-{rank}.json").write_text(json.dumps(metered_bytes(PROGRAMS[name])))
        dist.barrier()
    dist.destroy_process_group()


def metered_ranks(size: int, names: list[str]) -> dict[str, list[tuple[int, int]]]:
    """The metered bytes of each rank of programs on `size` forked gloo ranks."""
    transformers = ["transformers"] if any(not name.startswith("plain") for name in names) else []
    with tempfile.TemporaryDirectory() as folder:
        fork_ranks(size, lambda rank: run_rank(Path(folder), rank, names), imported=(*IMPORTED, *transformers))
        return {
            name: [tuple(json.loads((Path(folder) / f"{name}-{rank}.json").read_text())) for rank in range(size)]
            for name in names
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(PROGRAMS))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--write", action="store_true", help="keep the table in results/")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = given.names or list(PROGRAMS)
    lines = [
        *heading(
            "Bytes of ranks of programs of others, planned and metered",
            "In brackets the bytes in tensors beside the allocator's.",
        ),
        "| program | ranks | rank: planned / metered |",
        "|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    errors: list[float] = []
    for size in map(int, given.ranks.split(",")):
        metered = metered_ranks(size, names)
        for name in names:
            plan = napkin.plan_program(PROGRAMS[name], ranks=size)
            cells = []
            for rank, (tensors, allocated) in enumerate(metered[name]):
                planned = plan.rank(rank).ledger.peak_bytes
                errors.append(abs(planned / allocated - 1))
                cells.append(f"{rank}: {compared(planned, (tensors, allocated))}")
            lines.append(f"| {name} | {size} | {'; '.join(cells)} |")
            print(lines[-1], flush=True)
    worst = f"{len(errors)} ranks: median {statistics.median(errors):.4%}, worst {max(errors):.4%}"
    print(worst)
    if given.write:
        write_result("rank-programs", [*lines, "", worst])


if __name__ == "__main__":
    main()
