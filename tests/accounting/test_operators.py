import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from napkin import count
from napkin.accounting.contractions import CONTRACTIONS, Work
from napkin.accounting.operators import _COMPUTING, _MOVING, is_no_contraction, work_of
from napkin.accounting.recording import record
from oracles.brute_force_flops import ScalarProducts

aten, own = torch.ops.aten, torch.ops.napkin


def _flops(call: Callable[[], Any]) -> int:
    ledger = record(nn.Module(), call)
    assert not ledger.unknown_operators
    return ledger.flops


A, B, C = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(3, 5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(A[0], B[0]),
        lambda: torch.bmm(A, B),
        lambda: torch.addmm(C, A[0], B[0]),
        lambda: C.clone().addmm_(A[0], B[0]),
        lambda: torch.baddbmm(C.expand(2, 3, 5), A, B),
        lambda: torch.mv(A[0], B[0, :, 0]),
        lambda: torch.dot(A[0, 0], B[0, :, 0]),
        lambda: torch.mm(A[0], B[0], out=torch.empty(3, 5)),
    ],
    ids=["mm", "bmm", "addmm", "addmm_", "baddbmm", "mv", "dot", "out"],
)
def test_products_cost_what_they_multiply_and_add(call: Callable[[], Tensor]):
    with ScalarProducts() as oracle:
        call()
    assert _flops(call) == oracle.flops > 0


@pytest.mark.parametrize(
    ("call", "same"),
    [
        (lambda: C.expand(2, 3, 5).clone().baddbmm_(A, B), lambda: torch.bmm(A, B)),
        (lambda: torch.addbmm(C, A, B), lambda: torch.bmm(A, B)),
        (lambda: torch.addmv(C[:, 0], A[0], B[0, :, 0]), lambda: torch.mv(A[0], B[0, :, 0])),
        (lambda: torch.vdot(A[0, 0], B[0, :, 0]), lambda: torch.dot(A[0, 0], B[0, :, 0])),
        (lambda: aten._int_mm(A[0].to(torch.int8), B[0].to(torch.int8)), lambda: torch.mm(A[0], B[0])),
    ],
    ids=["baddbmm_", "addbmm", "addmv", "vdot", "int8"],
)
def test_a_products_other_forms_cost_the_same(call: Callable[[], Tensor], same: Callable[[], Tensor]):
    with ScalarProducts() as oracle:
        same()
    assert _flops(call) == oracle.flops


@pytest.mark.parametrize("form", ["rows of the left", "columns of the right", "summed over"])
def test_a_grouped_product_costs_what_its_groups_cost(form: str):
    ends = torch.tensor([16, 48], dtype=torch.int32)
    groups = [slice(0, 16), slice(16, 48)]
    wide, ragged, three = torch.ones(32, 48), torch.ones(48, 16), torch.ones(2, 16, 32)
    if form == "rows of the left":
        operands, parts = (ragged, three), [(ragged[group], three[i]) for i, group in enumerate(groups)]
    elif form == "columns of the right":
        operands, parts = (three, torch.ones(32, 48)), [(three[i], wide[:, group]) for i, group in enumerate(groups)]
    else:
        operands, parts = (wide, ragged), [(wide[:, group], ragged[group]) for group in groups]
    with ScalarProducts() as oracle:
        for left, right in parts:
            torch.mm(left, right)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [operand.to(torch.bfloat16) for operand in operands]
        assert _flops(lambda: aten._grouped_mm(*given, offs=ends)) == oracle.flops


def test_recurrent_cells_cost_what_torch_counts():
    cell = nn.GRU(5, 7, num_layers=2)
    x = torch.ones(3, 2, 5)
    with FlopCounterMode(display=False) as counter:
        cell(x)[0].sum().backward()
    assert _flops(lambda: cell(x)[0].sum().backward()) == counter.get_total_flops()


def test_an_lstm_costs_what_its_steps_multiply_and_add():
    lstm = nn.LSTM(5, 7)
    x, h, c = (torch.randn(*shape).requires_grad_() for shape in ((4, 2, 5), (1, 2, 7), (1, 2, 7)))
    of_input, of_state, input_bias, state_bias = lstm.parameters()
    wanted = [*lstm.parameters(), x, h, c]

    def own() -> Tensor:
        state, cell, outputs = h[0], c[0], []
        for now in x:
            gates = nn.functional.linear(now, of_input, input_bias)
            gates = gates + nn.functional.linear(state, of_state, state_bias)
            enter, forget, new, leave = gates.chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
            outputs.append(state)
        return torch.stack(outputs).square().sum()

    with ScalarProducts() as oracle:
        gradients = torch.autograd.grad(own(), wanted)
    torch.testing.assert_close(torch.autograd.grad(lstm(x, (h, c))[0].square().sum(), wanted), gradients)
    ledger = record(lstm, lambda: lstm(x, (h, c))[0].square().sum().backward())
    assert {row.operator for row in ledger.rows if row.flops} == {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
    assert ledger.flops == oracle.flops
    assert not ledger.unknown_operators

    # On CUDA one operator runs all layers: here two, in both directions.
    stack = nn.LSTM(5, 7, num_layers=2, bidirectional=True)
    given = {"input": x, "weight": list(stack.parameters())}
    once, twice = (
        work_of(operator.default, (), given, None) for operator in (aten._cudnn_rnn, aten._cudnn_rnn_backward)
    )
    assert isinstance(once, Work)
    assert isinstance(twice, Work)
    assert once.flops + twice.flops == count(stack, {"input": x}).flops


def test_a_bilinear_layer_costs_what_its_slices_multiply_and_add():
    layer = nn.Bilinear(3, 4, 2, bias=False)
    x, y, g = torch.randn(5, 3, requires_grad=True), torch.randn(5, 4, requires_grad=True), torch.randn(5, 2)
    w = layer.weight.detach()
    outputs, by_x, by_w, by_y = [], torch.zeros(5, 3), [], torch.zeros(5, 4)
    with ScalarProducts() as oracle, torch.no_grad():
        for o in range(2):
            (one_g, one_w) = g[:, o : o + 1], w[o : o + 1]
            outputs.append(oracle.contract("noj,nj->no", oracle.contract("ni,oij->noj", x, one_w), y))
            by_x += oracle.contract("nij,nj->ni", oracle.contract("no,oij->nij", one_g, one_w), y)
            by_w.append(oracle.contract("noi,nj->oij", oracle.contract("no,ni->noi", one_g, x), y))
            by_y += oracle.contract("noj,no->nj", oracle.contract("ni,oij->noj", x, one_w), one_g)
    output = layer(x, y)
    gradients = torch.autograd.grad(output, (x, layer.weight, y), g)
    torch.testing.assert_close((output, *gradients), (torch.cat(outputs, 1), by_x, torch.cat(by_w), by_y))
    assert _flops(lambda: layer(x, y).backward(g)) == oracle.flops


def test_distances_and_grids_cost_what_the_products_in_them_cost():
    a, b = torch.randn(2, 30, 3), torch.randn(2, 40, 3)
    one = torch.ones(2, 30, 1), torch.ones(2, 40, 1)
    theta = torch.randn(2, 2, 3)
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 3), torch.linspace(-1, 1, 5), indexing="ij")
    positions = torch.stack((columns, rows, torch.ones(3, 5)), dim=-1).flatten(0, 1).expand(2, -1, -1)
    with ScalarProducts() as oracle:
        left = torch.cat((-2 * a, a.square().sum(-1, keepdim=True), one[0]), -1)
        right = torch.cat((b, one[1], b.square().sum(-1, keepdim=True)), -1)
        distances = (left @ right.mT).clamp(min=0).sqrt()
        of_distances = oracle.flops
        grid = (positions @ theta.mT).unflatten(1, (3, 5))
    torch.testing.assert_close(torch.cdist(a, b), distances)
    torch.testing.assert_close(nn.functional.affine_grid(theta, [2, 1, 3, 5], align_corners=True), grid)
    assert _flops(lambda: torch.cdist(a, b)) == of_distances
    of_grid = _flops(lambda: nn.functional.affine_grid(theta, [2, 1, 3, 5], align_corners=True))
    assert of_grid == oracle.flops - of_distances


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 6), (6, 3)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (8, 4)])
def test_attention_on_any_device_costs_what_its_pairs_cost(
    causal: bool, queries: int, keys: int, head_dim: int, value_dim: int
):
    shapes = [(2, 3, queries, head_dim), (2, 3, keys, head_dim), (2, 3, keys, value_dim)]
    query, key, value = (torch.randn(shape).requires_grad_() for shape in shapes)
    expected = {}
    for name, oracle in {
        "all": ScalarProducts(),
        "causal": ScalarProducts(skip_masked=True),
        "again": ScalarProducts(recompute_scores=True),
    }.items():
        with oracle:
            output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
            forward = oracle.flops
            torch.autograd.backward(output.sum())
        expected[name] = (forward, oracle.flops)

    given = {"query": query, "key": key, "value": value}
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        whole = []
        for suffix in ("", "_backward"):
            operator = getattr(aten, f"_scaled_dot_product_{kind}{suffix}").default
            work = work_of(operator, (), {**given, "is_causal": causal}, None)
            assert isinstance(work, Work)
            whole.append(work)
        forward, backward = whole
        assert (forward.flops, forward.flops + backward.flops) == expected["all"]
        assert (forward.causal_flops, forward.causal_flops + backward.causal_flops) == expected["causal"]
        assert forward.flops + backward.flops + backward.recomputed_flops == expected["again"][1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_of_a_ring_share_the_pairs_of_the_whole_sequence(ranks: int):
    alone, own = (torch.empty(2, 4, length, 8, device="meta") for length in (16, 16 // ranks))
    for whole, part in (
        (aten._scaled_dot_product_flash_attention, torch.ops.napkin.ring_attention),
        (aten._scaled_dot_product_flash_attention_backward, torch.ops.napkin.ring_attention_backward),
    ):
        once = work_of(whole.default, (), {"query": alone, "key": alone, "value": alone, "is_causal": True}, None)
        each = work_of(part.default, (), {"query": own, "key": own, "value": own, "ranks": ranks}, None)
        assert once is not None
        assert each is not None
        for name in ("flops", "causal_flops", "recomputed_flops"):
            assert getattr(each, name) * ranks == getattr(once, name)


def test_every_formula_reads_arguments_that_its_operator_has():
    read = {
        "self mat2": "mm bmm _scaled_mm _scaled_mm_v2 _int_mm _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 "
        "_weight_int8pack_mm _weight_int4pack_mm_for_cpu",
        "mat1 mat2": "addmm addmm_ _addmm_activation",
        "batch1 batch2": "baddbmm baddbmm_ addbmm addbmm_",
        "self": "mv dot vdot linalg_cholesky_ex cholesky_inverse linalg_solve_triangular",
        "mat": "addmv addmv_",
        "input2": "cholesky_solve",
        "LU": "linalg_lu_solve",
        "A": "linalg_lu_factor_ex linalg_lu _linalg_det _linalg_slogdet linalg_inv_ex _linalg_solve_ex",
        "A mode": "linalg_qr",
        "input tau": "linalg_householder_product",
        "src proj_weight ffn_weight_1 ffn_weight_2": "_transformer_encoder_layer_fwd",
        "query key proj_weight": "_native_multi_head_attention",
        "input weight": "linear convolution convolution_backward _cudnn_rnn _cudnn_rnn_backward",
        "input weight0 weight1 weight2 weight3": "mkldnn_rnn_layer",
        "input weight1 weight2 weight3 weight4": "mkldnn_rnn_layer_backward",
        "i1 i2 i3 expand1 expand2 expand3 sumdim unroll_dim": "_trilinear",
        "x1 x2": "_euclidean_dist",
        "theta": "affine_grid_generator",
        "query key value": " ".join(packet.__name__ for packet in CONTRACTIONS if "dot_product" in packet.__name__),
    }
    checked = set()
    for names, operators in read.items():
        for operator in operators.split():
            packet = getattr(aten, operator)
            for overload in packet.overloads():
                arguments = {argument.name for argument in getattr(packet, overload)._schema.arguments}
                assert set(names.split()) <= arguments, (operator, overload)
            checked.add(packet)
    ring = [(packet, "query key value ranks") for packet in (own.ring_attention, own.ring_attention_backward)]
    blocks = [
        (packet, "query key value is_causal window query_offset")
        for packet in (own.flash_attention, own.flash_attention_backward)
    ]
    rows = [(packet, "query key value") for packet in (own.compiled_attention, own.compiled_attention_backward)]
    grouped = [(packet, "x weight") for packet in (own.grouped_matmul, own.fused_grouped_matmul)]
    outer = [(packet, "left right") for packet in (own.grouped_outer, own.fused_grouped_outer, own.int8_product)]
    slots = (own.attend_to_slots, own.fused_attend_to_slots, own.fused_attend_to_splits)
    decoded = [(packet, "query key value longest") for packet in slots]
    decoded += [(packet, "x matrix") for packet in (own.project_heads, own.project_activation, own.add_product)]
    decoded += [(own.multiply_vector, "input weight bias"), (own.quantized_product, "x values")]
    decoded += [(own.integer_product, "x values"), (own.compiled_head_rows, "input weight")]
    for packet, names in (*grouped, *outer, *ring, *blocks, *rows, *decoded):
        assert set(names.split()) <= {argument.name for argument in packet.default._schema.arguments}
        checked.add(packet)
    assert checked == set(CONTRACTIONS)


INFERENCE: dict[str, tuple[nn.Module, Callable[[nn.Module], Any]]] = {
    "matmul": (nn.Linear(4, 4), lambda layer: layer(A) @ A.mT),
    "einsum": (nn.Linear(4, 4), lambda layer: torch.einsum("bij,bkj->bik", layer(A), A)),
    "attention": (nn.Linear(4, 4), lambda layer: nn.functional.scaled_dot_product_attention(*[layer(A)[:, None]] * 3)),
    "convolution": (nn.Conv1d(3, 5, 2), lambda layer: layer(A)),
    "detached": (nn.Linear(4, 4), lambda layer: layer(A).clone().detach_().chunk(2)),
    "recurrent": (nn.RNN(4, 3), lambda layer: layer(A)),
}


@pytest.mark.parametrize("case", INFERENCE)
def test_in_inference_mode_an_operator_costs_what_it_costs_where_autograd_takes_it_apart(case: str):
    layer, call = INFERENCE[case]
    trained = record(layer, lambda: call(layer))
    with torch.inference_mode():
        answered = record(layer, lambda: call(layer))
    assert not answered.unknown_operators
    assert answered.flops == trained.flops > 0
    assert answered.elementwise_flops == trained.elementwise_flops


def test_asking_a_tensor_whether_it_is_zero_is_no_unknown_operator():
    with torch.inference_mode():
        ledger = record(nn.Module(), lambda: torch.is_nonzero(torch.ones(())))
    assert not ledger.unknown_operators


def test_torchs_fast_encoder_layer_costs_what_its_parts_cost():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    x = torch.ones(2, 3, 8)
    parts = record(layer, lambda: layer(x.requires_grad_()))
    with torch.inference_mode():
        whole = record(layer, lambda: layer(x))
    assert {row.operator for row in whole.rows if row.flops} == {"_transformer_encoder_layer_fwd"}
    assert whole.flops == parts.flops


SQUARE = torch.randn(2, 24, 24, dtype=torch.float64)
SPD = SQUARE @ SQUARE.mT + torch.eye(24, dtype=torch.float64)


def _eliminated(matrix: Tensor, *, both_sides: bool) -> int:
    """FLOPs of Gaussian elimination by loops, of one triangle alone where the matrix is symmetric."""
    flops, (m, n) = 0, matrix.shape
    for pivot in range(min(m, n)):
        for row in range(pivot + 1, m):
            flops += 1 + 2 * len(range(pivot + 1, n if both_sides else row + 1))
    return flops


def _reflected(m: int, n: int) -> int:
    """FLOPs of Householder's reflections of an [m, n] matrix: each column's with all columns to its right."""
    return sum(4 * (m - at) * (n - at) for at in range(min(m, n)))


@pytest.mark.parametrize(
    ("call", "loops"),
    [
        (lambda: torch.linalg.cholesky(SPD), lambda: 2 * _eliminated(SPD[0], both_sides=False)),
        (lambda: torch.linalg.lu_factor(SQUARE[..., :16]), lambda: 2 * _eliminated(SQUARE[0, :, :16], both_sides=True)),
        (lambda: torch.linalg.lu_factor(SQUARE[:, :16]), lambda: 2 * _eliminated(SQUARE[0, :16], both_sides=True)),
        (lambda: torch.linalg.det(SQUARE), lambda: 2 * _eliminated(SQUARE[0], both_sides=True)),
        (
            lambda: torch.linalg.solve(SQUARE, SQUARE[0]),
            lambda: 2 * (_eliminated(SQUARE[0], both_sides=True) + 2 * 24**3),
        ),
        (
            lambda: torch.linalg.solve(SQUARE[0], SQUARE[1, 0]),
            lambda: _eliminated(SQUARE[0], both_sides=True) + 2 * 24**2,
        ),
        (lambda: torch.linalg.inv(SQUARE), lambda: 2 * 2 * 24**3),
        (lambda: torch.linalg.solve_triangular(SPD, SQUARE[..., :5], upper=True), lambda: 2 * 24**2 * 5),
        (lambda: torch.linalg.qr(SQUARE[..., :16], mode="r"), lambda: 2 * _reflected(24, 16)),
        (lambda: torch.linalg.qr(SQUARE[..., :16]), lambda: 4 * _reflected(24, 16)),
        (lambda: torch.cholesky_inverse(SPD), lambda: 2 * 2 * 24**3 // 3),
        (lambda: torch.cholesky_solve(SQUARE[..., :3], SPD), lambda: 2 * 2 * 24**2 * 3),
    ],
    ids="cholesky tall wide det solve solve-one inverse triangular r q-and-r cholesky_inverse cholesky_solve".split(),
)
def test_direct_factorizations_cost_the_leading_terms_of_their_loops(call: Callable[[], Any], loops: Callable[[], int]):
    assert _flops(call) == pytest.approx(loops(), rel=0.12)


def test_every_operator_of_torch_that_runs_on_a_cpu_is_in_a_table_or_named_here():
    # Contractions without a formula: they iterate until they have converged, or depend on where a sparse tensor has its
    # numbers, or only torch's own tests and other back ends call them.
    patterns = (
        "_linalg_svd|_linalg_eigh|_linalg_eigvals|linalg_(eig|eigvals|lstsq|matrix_exp|pinv)|_fft_.*|"
        ".*ldl.*|.*sparse.*|sspaddmm|.*mkldnn.*|.*miopen.*|.*mps.*|.*cudnn.*|quantized_(gru|lstm)|_test_.*|_foobar|"
        ".*overrideable.*|_triton_.*|_dyn_quant_matmul_4bit|.*slow_conv.*|_nnpack_.*|conv_(tbc|depthwise3d)|"
        "_convolution|_transformer_.*|linear_backward|matmul_backward|cholesky|_cholesky_solve_helper|geqrf|ormqr|"
        "triangular_solve"
    )
    missing = set()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        runs = any(has_kernel(name, key) for key in ("CPU", "CompositeExplicitAutograd"))
        if space != "aten" or not runs or re.fullmatch(patterns, base):
            continue
        operator = getattr(getattr(aten, base), overload or "default")
        if operator.overloadpacket not in CONTRACTIONS and not is_no_contraction(operator):
            missing.add(name)
    assert not missing


def test_no_operator_stands_in_two_tables_and_each_exists():
    contractions = {packet.__name__.removesuffix("_") for packet in CONTRACTIONS}
    assert not contractions & _COMPUTING
    assert not contractions & _MOVING
    assert not _COMPUTING & _MOVING
    for name in _COMPUTING | _MOVING:
        assert hasattr(aten, name) or hasattr(aten, name + "_"), name


WIDE = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (lambda: torch.relu(WIDE), 12),
        (lambda: WIDE.clone().mul_(2), 12),
        (lambda: torch.ones(3, 1) + torch.ones(1, 4), 12),
        (lambda: WIDE.sum(), 12),
        (lambda: WIDE.softmax(-1), 12),
        (lambda: nn.functional.layer_norm(WIDE, (4,)), 12),
        (lambda: aten._foreach_add([WIDE, torch.ones(5)], 1), 17),
        (lambda: WIDE @ torch.ones(4, 2), 0),
        (lambda: WIDE.t(), 0),
        (lambda: torch.cat([WIDE, WIDE]), 0),
        (lambda: WIDE.to(torch.bfloat16), 0),
        (lambda: nn.functional.embedding(torch.tensor([1, 2]), WIDE), 0),
    ],
    ids="pointwise in-place broadcast sum softmax norm foreach product view moved cast looked-up".split(),
)
def test_elementwise_work_is_one_an_element_and_apart_from_products(call: Callable[[], Any], flops: int):
    ledger = record(nn.Module(), call)
    assert ledger.elementwise_flops == flops
    assert not (ledger.elementwise_flops and ledger.flops)
