"""Scripts rehearsed without a GPU are counted as the same step is when it is handed to `count`, or by hand."""

import json
import signal
import subprocess
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch
from torch import nn

from napkin.accounting.counting import count
from napkin.cli import main
from napkin.errors import NapkinError
from napkin.hardware.target import CudaTarget
from napkin.planning.rehearsal import rehearsal
from napkin.planning.rehearsal.rehearsal import rehearse
from reliability.harness import Command, Napkin

MODEL = """
import os, sys, torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 512))

def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
"""


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 512))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


PARAMETERS = sum(parameter.numel() for parameter in build().parameters())


def flops_of(tokens: int) -> int:
    """Products of both matrices: forward, and twice in the backward pass."""
    return 3 * 2 * tokens * (256 * 1024 + 1024 * 512)


class Fork:
    """What `start_script` returns, of a fork of a process that has imported torch."""

    def __init__(self, command: Command, output: IO[bytes]) -> None:
        self.command, self.output, self.pid = command, output, command.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        ended = self.returncode is not None or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        return self.wait() if ended else None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self.command.wait()
            self.output.write(self.command.out.read_bytes() + self.command.err.read_bytes())
        return self.returncode

    def kill(self) -> None:
        self.command.send(signal.SIGKILL)


@pytest.fixture
def forks(server: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Rehearsals of this process run in forks, which import nothing; those of a command begin as the user's do."""
    streams = tmp_path_factory.mktemp("streams")

    def start(code: str, *arguments: str, folder: str, environment: dict[str, str], output: IO[bytes]) -> Fork:
        program = f"import sys; sys.argv[1:] = {list(arguments)!r}; {code}"
        begun = Napkin(Path(folder), server, streams)
        return Fork(begun.start(program=program, environment=environment), output)

    monkeypatch.setattr(rehearsal, "start_script", start)


@pytest.fixture
def plain_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its rehearsals begin as the user's do: a fork has settings of compilation that were made before."""
    monkeypatch.chdir(tmp_path)

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(MODEL + body)
        return path

    return write


@pytest.fixture
def script(plain_script, forks: None):
    return plain_script


def test_ddp_with_a_loss_scale_sums_each_gradient_once(script) -> None:
    found = rehearse(
        script("""
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = DDP(build().to(device), device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(10):
    x = torch.randint(512, (8, 64), device=device)
    assert x.is_cuda and x.device.type == "cuda" and model.device_ids is None
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_of(model, x, x)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""")
    )
    assert found.ledger.parameters == PARAMETERS
    assert found.ledger.flops == flops_of(8 * 64)
    assert found.collectives["all_reduce"]["bytes"] == 4 * PARAMETERS
    assert found.ledger.peak_by_category["optimizer state"] == pytest.approx(8 * PARAMETERS, rel=0.001)
    assert {"LOCAL_RANK"} <= found.environment.keys()


@pytest.mark.thorough
def test_fully_shard_leaves_each_rank_an_eighth(script) -> None:
    found = rehearse(
        script("""
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
model = build().cuda()
for part in (model[1], model[3]):
    fully_shard(part, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    x = torch.randint(512, (8, 64), device="cuda")
    loss_of(model, x, x).backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    )
    assert found.ledger.flops == flops_of(8 * 64)
    assert found.ledger.peak_by_category["optimizer state"] == pytest.approx(8 * PARAMETERS / 8, rel=0.01)
    assert found.collectives["reduce_scatter"]["bytes"] == 4 * PARAMETERS
    assert found.collectives["all_gather"]["bytes"] >= 4 * PARAMETERS


@pytest.mark.thorough
def test_a_loop_over_an_absent_file_is_the_counted_step(script) -> None:
    path = script("""
import numpy as np
from torch.utils.data import DataLoader, Dataset

class Tokens(Dataset):
    def __init__(self):
        self.data = np.memmap("data/train.bin", dtype=np.uint16, mode="r")
    def __len__(self):
        return len(self.data) // 65
    def __getitem__(self, i):
        return torch.from_numpy(self.data[65 * i : 65 * i + 65].astype(np.int64))

device = "cuda" if torch.cuda.is_available() else "cpu"
model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(Tokens(), batch_size=8, shuffle=True, num_workers=2, pin_memory=True):
    batch = batch.to(device, non_blocking=True)
    loss = loss_of(model, batch[:, :-1], batch[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
""")
    found = rehearse(path, on="H100")

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        counted = count(model, torch.zeros(8, 65, dtype=torch.int64), step, target=CudaTarget())
    assert found.ledger.flops == counted.flops == flops_of(8 * 64)
    assert found.ledger.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.001)
    assert found.absent_files
    assert not (path.parent / "data").exists()


def test_arguments_and_accumulated_micro_batches_are_the_scripts(script) -> None:
    found = rehearse(
        script("""
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
options = parser.parse_args()
model = build().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    for micro in range(options.accumulate):
        x = torch.randint(512, (4, 64)).cuda()
        (loss_of(model, x, x) / options.accumulate).backward()
    optimizer.step()
    optimizer.zero_grad()
open("log.txt", "w").write("never reached")
"""),
        ["--accumulate", "3"],
        on="H100",
    )
    assert found.ledger.flops == 3 * flops_of(4 * 64)
    assert found.communication.times == 0
    assert not Path("log.txt").exists()


def test_values_that_decide_are_those_of_a_healthy_run(script) -> None:
    found = rehearse(
        script("""
model = build().cuda()
optimizer = torch.optim.AdamW(model.parameters())
best = float("inf")
for step in range(10):
    x = torch.randint(512, (8, 64), device="cuda")
    loss = loss_of(model, x, x)
    if torch.isnan(loss).any() or not torch.isfinite(loss).all() or loss.item() > 1e4:
        sys.exit(3)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm.item() < float("inf"):
        optimizer.step()
    optimizer.zero_grad()
    best = min(best, float(loss))
"""),
        on="H100",
    )
    assert found.ledger.flops == flops_of(8 * 64)


def test_what_stands_in_the_way_is_named_with_its_line_and_a_way_out(script) -> None:
    path = script("import nowhere_to_be_found\n")
    with pytest.raises(NapkinError, match=r"script\.py:\d+: import nowhere_to_be_found.*--setup"):
        rehearse(path, on="H100")
    adapter = path.with_name("adapter.py")
    adapter.write_text("import sys, types\nsys.modules['nowhere_to_be_found'] = types.ModuleType('nowhere')\n")
    with pytest.raises(NapkinError, match="0 updates"):
        rehearse(path, on="H100", setup=adapter)


def test_processes_of_a_script_and_an_update_by_hand_are_those_of_rank_0(script) -> None:
    found = rehearse(
        script("""
import torch.multiprocessing as mp
import torch.distributed as dist

def work(rank, world_size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    model = nn.parallel.DistributedDataParallel(build().to(rank), device_ids=[rank])
    for step in range(10):
        x = torch.randint(512, (8, 64), device=rank)
        model.zero_grad()
        loss_of(model, x, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count(), join=True)
""")
    )
    assert found.ledger.flops == flops_of(8 * 64)
    assert found.collectives["all_reduce"]["bytes"] == 4 * PARAMETERS
    assert any("of the 8 processes" in note for note in found.notes)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()", "required: data"),
        ("print('no shards: run prepare.py')\nsys.exit(3)", "status 3, after it said 'no shards: run prepare.py'"),
        ("sys.exit('no shards: run prepare.py')", "exits with no shards: run prepare.py"),
    ],
)  # fmt: skip
def test_a_script_that_ends_itself_is_quoted(script, body: str, why: str) -> None:
    with pytest.raises(NapkinError, match=rf"(?s)script\.py:\d+.*{why}.*after `--`"):
        rehearse(script(body), on="H100")


def test_absent_packages_and_folders_are_stood_in_for(script, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rehearse(
        script("""
import gzip, numpy as np
import triton, triton.language as tl
import matplotlib.pyplot as plt
from torch.utils.tensorboard import SummaryWriter
from kernels import get_kernel
from torchvision import datasets, transforms

attention = get_kernel("somebody/flash-attention-3").flash_attn_interface

@triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=4)], key=["n"])
@triton.jit
def scale(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.load(x))

class Attend(nn.Module):
    def forward(self, x):
        heads = x[0].unflatten(-1, (2, 32))
        ends = torch.arange(0, 257, 64, device="cuda", dtype=torch.int32)
        return attention.flash_attn_varlen_func(
            heads, heads, heads, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=64, max_seqlen_k=64, causal=True
        ).flatten(1)

for _ in range(2):
    os.makedirs("/nowhere/checkpoints", exist_ok=True)
names = sorted(name for name in os.listdir("shards") if "train" in name)
tokens = np.memmap(os.path.join("shards", names[0]), dtype=np.uint16, mode="r")
assert len(tokens) > 10**6 and len(gzip.open("enwik8.gz").read(1000)) == 1000
header = np.fromfile("shards/other.bin", dtype=np.int32, count=256)
assert header[0] == 20251231 and header[1] == 9
pictures = datasets.MNIST("data", train=True, download=True, transform=transforms.Compose(
    [transforms.Resize(8), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]))
assert pictures[0][0].shape == (1, 8, 8) and len(pictures.classes) == 10
import copy
model = copy.deepcopy(nn.Sequential(nn.Linear(64, 64, bias=False), Attend()).to("cuda:0"))
total = torch.tensor(0.5, device="cuda", requires_grad=True)
assert total.is_cuda and total.requires_grad and total.item() == 0.5 and torch.as_tensor([1.0], device="cuda").is_cuda
assert model[0].weight.is_cuda and len(os.listdir("shards")) == 4
assert torch.compile(lambda x: (x + 1).sum())(torch.ones(8, device="cuda")).is_cuda
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
SummaryWriter("log").add_scalar("loss", 1.0, 0)
for step in range(3):
    x = torch.stack([pictures[i][0].flatten() for i in range(256)])[None].cuda()
    y = model(x)
    scale[(1,)](y, y.numel(), BLOCK=128)
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
plt.plot([1.0])
"""),
        on="1xH100",
    )

    class Attend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Four documents of 64 tokens with two heads of 32 channels.
            heads = x.unflatten(-2, (4, 64)).unflatten(-1, (2, 32)).transpose(-2, -3).flatten(0, 1)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    model = nn.Sequential(nn.Linear(64, 64, bias=False), Attend())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(module: nn.Module, x: torch.Tensor) -> None:
        module(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    counted = count(model, torch.zeros(1, 256, 64), step, target=CudaTarget())
    assert found.ledger.flops == counted.flops
    assert any("the work of scale is not counted" in note for note in found.notes)
    assert any("somebody/flash-attention-3" in note for note in found.notes)


def test_flat_parameters_are_sharded_by_the_modules_that_their_policy_wraps(script) -> None:
    found = rehearse(
        script("""
import functools
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
dist.init_process_group("nccl")
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
model = FSDP(build(), auto_wrap_policy=policy, device_id=torch.cuda.current_device(),
             mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), sharding_strategy=ShardingStrategy.FULL_SHARD)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    x = torch.randint(512, (8, 64)).to(0)
    loss_of(model, x, x).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
""")
    )
    assert found.ledger.flops == flops_of(8 * 64)
    assert found.ledger.peak_by_category["optimizer state"] == pytest.approx(8 * PARAMETERS / 8, rel=0.01)
    # Matrices are gathered in two bytes, for the forward and again for the backward pass, and the embedding once.
    matrices = 256 * 1024 + 1024 * 512 + 1024 + 512
    assert found.collectives["all_gather"]["bytes"] == pytest.approx(2 * (2 * matrices + 512 * 256), rel=0.01)
    assert found.collectives["reduce_scatter"]["bytes"] == pytest.approx(2 * PARAMETERS, rel=0.01)


CHANGES = [
    "os.remove('kept/result.txt')",
    "shutil.rmtree('kept')",
    "pathlib.Path('kept/result.txt').unlink()",
    "os.truncate('result.txt', 0)",
    "os.rename(os.path.realpath('kept'), 'elsewhere')",
    "os.chmod('result.txt', 0)",
]
ELSEWHERE = [
    # What is done to a link in the rehearsal's own folder is done to the link.
    "open('kept/result.txt', 'a').write('more')",
    "open('result.txt', 'w').write('new')",
    "os.replace('result.txt', 'gone.txt')",
    "os.remove('gone.txt')",
]


def test_files_that_are_there_stay_as_they_are(script, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for name in ("result.txt", "kept/result.txt"):
        (tmp_path / name).write_text("a week of work")
    path = script(f"""
import pathlib, shutil
refused = []
for change in {CHANGES + ELSEWHERE!r}:
    try:
        exec(change)
    except OSError as error:
        assert "a file of yours" in str(error) or "symbolic link" in str(error), error
        refused.append(change)
sys.exit(0 if refused == {CHANGES!r} else str(refused))
""")
    with pytest.raises(NapkinError, match="0 updates"):
        rehearse(path, on="H100")
    for name in ("result.txt", "kept/result.txt"):
        assert (tmp_path / name).read_text() == "a week of work"
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.thorough
def test_a_script_that_does_not_end_is_stopped(script) -> None:
    with pytest.raises(NapkinError, match="--seconds"):
        rehearse(script("while True: pass\n"), on="H100", most_seconds=6)


COMPILED = """
model = torch.compile(build().cuda(), fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    x = torch.randint(512, (8, 64), device="cuda")
    assert x.is_cuda
    loss_of(model, x, x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.thorough
def test_the_command_prints_a_compiled_step_as_json(plain_script, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain_script(COMPILED)
    assert main(["rehearse", str(path), "9", "--on", "H100", "--torch", "2.8", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["parameters"] == PARAMETERS
    assert not any("eagerly" in note for note in values["notes"])
    assert values["peak_bytes"] == sum(values["peak_by_category"].values())
    assert values["highest_bytes"] >= values["peak_bytes"]

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model: Any = torch.compile(build())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        counted = count(model, torch.zeros(8, 64, dtype=torch.int64), step, target=CudaTarget(), warm_up=2)
    assert values["flops"] == counted.flops
    assert values["peak_bytes"] == pytest.approx(counted.peak_bytes, rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.torture)])
def test_a_compiled_step_of_several_graphs_names_what_only_a_measurement_decides(plain_script, in_place: bool) -> None:
    found = rehearse(
        plain_script("""
def step(model, x):
    torch._dynamo.graph_break()
    return loss_of(model, x, x)

step = torch.compile(step, mode="max-autotune-no-cudagraphs")
model = build().cuda()
if len(sys.argv) > 1:
    model.compile()
    step = lambda model, x: loss_of(model, x, x)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randint(512, (8, 64), device="cuda")
    step(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""),
        ["in-place"] * in_place,
        on="H100",
    )
    assert found.ledger.flops == flops_of(8 * 64)
    assert any(row.operator.startswith("triton_") for row in found.ledger.rows)
    assert [note for note in found.notes if note.startswith("max_autotune times kernels")]


def test_an_evaluation_of_more_tokens_than_a_step_is_the_most(script) -> None:
    found = rehearse(
        script("""
model = build().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    x = torch.randint(512, (8, 64), device="cuda")
    loss_of(model, x, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        with torch.no_grad():
            x = torch.randint(512, (800, 64), device="cuda")
            loss_of(model, x, x)
"""),
        on="H100",
    )
    assert found.highest.place == "in an evaluation after 6 updates"
    # Hidden numbers of both sides of the activation function.
    assert found.highest.bytes > 800 * 64 * 2 * 1024 * 4 > found.ledger.peak_bytes


def test_a_release_of_torch_is_two_numbers(script) -> None:
    with pytest.raises(NapkinError, match="'new' is not a release of torch: use two numbers"):
        rehearse(script(""), on="H100", torch="new")
