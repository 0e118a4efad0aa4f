"""What the pages of ideas are answered, beside closed forms, other implementations and brute force."""

import math
import shlex
import subprocess
from collections import Counter
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from napkin.accounting.counting import count
from napkin.accounting.pipeline_schedules import SCHEDULES
from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import PolicyAlgorithm
from napkin.scaling.isoflop import approach_2
from napkin.scaling.law_fit import fit_law
from napkin.scaling.observations import EXAMPLE, drop_highest, read_observations
from napkin.studio.learn.batching import BatchingRequest, batching_answer
from napkin.studio.learn.idea import Idea
from napkin.studio.learn.ideas import IDEAS
from napkin.studio.learn.laws import IsoFlopRequest, LawRequest, isoflop_answer, law_answer
from napkin.studio.learn.merges import MergesRequest, merges_answer
from napkin.studio.learn.numbers import NumberRequest, number_answer
from napkin.studio.learn.ranks import PipelineRequest, RingRequest, pipeline_answer, ring_answer, ring_steps
from napkin.studio.learn.rewards import RewardRequest, reward_answer
from napkin.studio.learn.steps import MODES, MemoryRequest, RooflineRequest, memory_answer, roofline_answer
from napkin.studio.learn.views import ViewRequest, view_answer
from reliability.harness import Napkin


@pytest.mark.parametrize("idea", IDEAS.values(), ids=lambda idea: idea.name)
def test_every_first_answer_is_json_and_every_file_exists(idea: Idea) -> None:
    assert msgspec.json.decode(msgspec.json.encode(idea.answer(idea.request())))
    for file in idea.files:
        assert (files("napkin") / file).is_file()


@pytest.mark.parametrize("value", ["0.1", "-3e-5", "65504", "1e-8", "inf"])
def test_a_number_and_its_gaps_are_those_of_numpy(value: str) -> None:
    answer = number_answer(NumberRequest(value=value, format="fp16"))
    rounded = np.float16(value)
    assert float(answer["value"]["text"]) == float(rounded)
    assert "".join(each["bit"] for each in answer["fields"]) == f"{rounded.view(np.uint16):016b}"
    if np.isfinite(rounded):
        with np.errstate(over="ignore"):
            above = np.nextafter(rounded, np.float16(np.inf), dtype=np.float16)
        assert answer["above"] == (None if np.isinf(above) else float(above) - float(rounded))
    by_bits = number_answer(NumberRequest(format="fp16", bits=f"{rounded.view(np.uint16):016b}"))
    assert by_bits["value"] == answer["value"]


def test_views_read_the_places_that_indices_say() -> None:
    x = torch.arange(12.0).view(3, 4)
    answer = view_answer(ViewRequest(steps="x.T; x[1:]; x[:, ::2]"))
    assert answer["values"] == x.T[1:][:, ::2].flatten().tolist() == answer["places"]
    assert [each["storage"] for each in answer["tensors"]] == [1, 1, 1, 1]
    last = answer["tensors"][-1]
    by_hand = [
        last["offset"] + i * last["strides"][0] + j * last["strides"][1]
        for i in range(last["shape"][0])
        for j in range(last["shape"][1])
    ]
    assert answer["places"] == by_hand
    copied = view_answer(ViewRequest(steps="x.T; x.reshape(-1)"))
    assert [each["storage"] for each in copied["tensors"]] == [1, 1, 2]
    assert copied["storage"] == x.T.flatten().tolist()
    refused = view_answer(ViewRequest(steps="x.T; x.view(-1)"))
    assert "cannot be merged" in refused["refused"]
    with pytest.raises(RuntimeError):
        x.T.view(-1)


def test_merges_are_those_of_a_count_by_hand() -> None:
    text = "low lower lowest slow slower"
    words = [list(piece) for piece in ("low", " lower", " lowest", " slow", " slower")]
    for merges in range(6):
        answer = merges_answer(MergesRequest(text=text, merges=merges))
        assert answer["pieces"] == words
        assert answer["sizes"][merges] == sum(map(len, words))
        counts = Counter(pair for word in words for pair in pairwise(word))
        best = max(counts, key=lambda pair: (counts[pair], pair))
        first = answer["candidates"][0]
        assert (tuple(first["pair"]), first["count"], first["next"]) == (best, counts[best], True)
        for word in words:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == best:
                    word[place : place + 2] = ["".join(best)]
                place += 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_computes_all_once_and_never_two_at_a_time(schedule: str) -> None:
    asked = PipelineRequest(schedule=schedule, ranks=4, micro_batches=8, stages_per_rank=2)
    answer = pipeline_answer(asked)
    for timed in answer["actions"]:
        assert all(before[4] <= after[3] + 1e-9 for before, after in pairwise(timed))
        # A forward pass and a backward pass of twice its seconds for each micro-batch.
        assert sum(end - start for *_, start, end in timed) == pytest.approx(3 * 8)
    if answer["rule"] is not None:
        assert answer["bubble"] == pytest.approx(answer["rule"]) == pytest.approx(3 / 8 / answer["stages_per_rank"])


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_the_steps_of_a_ring_add_up_numbers(operation: str, ranks: int) -> None:
    given = np.random.default_rng(0).integers(1, 100, (ranks, ranks))
    steps = ring_steps(operation, ranks)
    own = given.copy()
    if operation == "all_gather":
        # The same tensor for all, of which each rank has one part at first.
        own = np.where(np.array([[bool(part) for part in of_rank] for of_rank in steps[0]["held"]]), given[0], 0)
        assert (np.count_nonzero(own, axis=1) == 1).all()
    for step in steps[1:]:
        before = own.copy()
        assert [rank for rank, _ in step["sent"]] == list(range(ranks))
        for rank, part in step["sent"]:
            to = (rank + 1) % ranks
            own[to, part] = before[rank, part] + (before[to, part] if step["adds"] else 0)
    assert len(steps) - 1 == (2 if operation == "all_reduce" else 1) * (ranks - 1)
    whole = given[0] if operation == "all_gather" else given.sum(axis=0)
    done = np.array([[len(part) == ranks for part in of_rank] for of_rank in steps[-1]["held"]])
    if operation == "reduce_scatter":
        assert (done.sum(axis=0) == 1).all()
        assert (done.sum(axis=1) == 1).all()
        assert ((own == whole) | ~done).all()
    else:
        assert (own == whole).all()


def test_bytes_over_a_link_and_their_seconds_are_the_closed_form() -> None:
    answer = ring_answer(RingRequest(bytes=1e9, devices=8, ranks=8))
    assert answer["bytes_per_link"] == 2 * 7 / 8 * 1e9
    assert answer["rule"] == pytest.approx(answer["bytes_per_link"] / answer["bandwidth"])
    assert answer["seconds"] > 0.5 * answer["rule"]
    half = ring_answer(RingRequest(operation="all_gather", bytes=1e9, devices=8, ranks=8))
    assert half["rule"] == pytest.approx(answer["rule"] / 2)


class _Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_the_roofline_of_attention_and_of_a_product_has_the_counted_figures() -> None:
    asked = RooflineRequest(operator="attention", batch=2, heads=4, kv_heads=4, head_dim=64, context=256)
    answer = roofline_answer(asked)
    q = torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16)
    ledger = count(_Attention(), (q, q, q))
    assert answer["flops"] == ledger.flops
    assert answer["bytes"] == 4 * q.nbytes
    product = roofline_answer(RooflineRequest(m=1, k=512, n=1024))
    assert (product["flops"], product["bytes"]) == (2 * 512 * 1024, 2 * (512 + 512 * 1024 + 1024))
    assert product["seconds"] == product["bytes"] / product["bandwidth"]
    large = roofline_answer(RooflineRequest())
    assert large["seconds"] == large["flops"] / large["peak"]


def test_recomputation_moves_the_peak_of_the_counted_step() -> None:
    from napkin.planning import plan
    from napkin.recipe.toml_file import recipe_of_values

    answer = memory_answer(MemoryRequest(n_layers=2, d_model=128, context_length=128, batch_size=4, vocab_size=512))
    peaks = {}
    for mode in MODES:
        sums = [sum(parts) for parts in zip(*answer[mode]["uses"].values(), strict=True)]
        assert max(sums) == pytest.approx(answer[mode]["peak"], rel=0.02)
        assert answer[mode]["seconds"] == sorted(answer[mode]["seconds"])
        model = {"n_layers": 2, "d_model": 128, "n_heads": 2, "vocab_size": 512, "context_length": 128}
        training = {"batch_size": 4, "micro_batch_size": 4, "precision": "bf16", "recompute": mode, "compile": "off"}
        values = {"model": model, "training": training, "optimizer": {"name": "adamw"}}
        planned = plan(recipe_of_values(values, "the test"), on="H100")
        assert answer[mode]["peak"] == planned.ledger.peak_bytes
        peaks[mode] = answer[mode]["peak"]
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    assert answer["none"]["step_seconds"] < answer["selective"]["step_seconds"] < answer["full"]["step_seconds"]


def test_isoflop_curves_are_approach_2_of_the_example() -> None:
    answer = isoflop_answer(IsoFlopRequest())
    runs, _ = drop_highest(read_observations(EXAMPLE).runs, 5)
    law = approach_2(runs)
    assert [each["parameters"] for each in answer["best"]] == [each.parameters for each in law.best]
    assert answer["parameters"]["estimate"] == law.optimum(5.76e23)[0].estimate == answer["line"][-1][1]
    for budget, best in zip(answer["budgets"], law.best, strict=True):
        lowest = min(loss for _, loss in budget["curve"])
        assert lowest == pytest.approx(best.loss, abs=5e-3)
    fewer = isoflop_answer(IsoFlopRequest(largest=1e20))
    assert max(each["flops"] for each in fewer["best"]) <= 1e20 < max(each["flops"] for each in answer["best"])


def test_a_law_of_small_runs_is_held_against_the_runs_it_did_not_see() -> None:
    answer = law_answer(LawRequest(largest=1e20))
    runs, _ = drop_highest(read_observations(EXAMPLE).runs, 5)
    seen = [run for run in runs if run.compute <= 1e20]
    law = fit_law(seen, "chinchilla").law
    later = [run for run in runs if run.compute > 1e20]
    inside = 0
    for run, (compute, loss, estimate, low, high) in zip(later, answer["later"], strict=True):
        assert (compute, loss) == (run.compute, run.loss)
        inside += low <= loss <= high
        e, a, b, alpha, beta = (law.coefficients[""][name].estimate for name in ("E", "A", "B", "alpha", "beta"))
        assert estimate == pytest.approx(e + a / run.parameters**alpha + b / run.tokens**beta, rel=1e-6)
    assert answer["inside"] == inside
    assert len(answer["seen"]) == len(seen)


def test_continuous_batching_computes_the_same_tokens_in_fewer_steps() -> None:
    requests = [(12, 40), (30, 8), (8, 12), (20, 60), (10, 6), (16, 24)]
    text = " ".join(f"{prompt}+{answer}" for prompt, answer in requests)
    answer = batching_answer(BatchingRequest(requests=text, slots=2, prefill_chunk=16, blocks=256))
    for run in (answer["static"], answer["continuous"]):
        decoded = Counter()
        for _, request, kind, begin, end in run["spans"]:
            if kind == "decode":
                decoded[request] += end - begin
        # The first token of an answer comes with the end of its prompt.
        assert [decoded[number] for number in range(len(requests))] == [out - 1 for _, out in requests]
        places = Counter((slot, step) for slot, _, _, begin, end in run["spans"] for step in range(begin, end))
        assert max(places.values()) == 1
        assert run["busy"] == pytest.approx(len(places) / (2 * run["steps"]))
        assert run["steps"] == max(run["done_at"])
    assert answer["continuous"]["steps"] < answer["static"]["steps"]
    # Alone in the engine, a request takes its chunks and then a step per token.
    alone = batching_answer(BatchingRequest(requests="30+8", slots=1, prefill_chunk=16, blocks=64))
    assert alone["static"]["steps"] == alone["continuous"]["steps"] == math.ceil(30 / 16) + 8 - 1
    assert answer["bytes_per_token"] == 2 * 32 * 8 * 128 * 2  # Llama 3 8B


def test_a_cache_of_few_blocks_takes_from_who_came_last() -> None:
    requests = "12+40 30+8 8+12 20+60"
    few = batching_answer(BatchingRequest(requests=requests, slots=4, blocks=24, block_size=4))["continuous"]
    many = batching_answer(BatchingRequest(requests=requests, slots=4, blocks=256, block_size=4))["continuous"]
    assert few["preempted"] > 0 == many["preempted"]
    assert few["steps"] > many["steps"]
    assert max(few["blocks"]) <= 24


def test_advantages_and_weights_are_the_formulas() -> None:
    rewards, lengths = np.array([1, 0, 0, 0.5]), np.array([10, 40, 20, 30])

    def answered(algorithm: PolicyAlgorithm, max_answer: int = 128) -> dict[str, Any]:
        return reward_answer(RewardRequest("1, 0, 0, 0.5", "10 40 20 30", algorithm, max_answer))

    grpo = answered("grpo")
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert [each["advantage"] for each in grpo["completions"]] == pytest.approx(expected.tolist())
    assert [each["token_weight"] for each in grpo["completions"]] == pytest.approx((1 / (4 * lengths)).tolist())
    assert sum(each["pull"] for each in grpo["completions"]) == pytest.approx(0, abs=1e-9)
    plain = answered("dr-grpo", 64)
    assert [each["advantage"] for each in plain["completions"]] == pytest.approx((rewards - rewards.mean()).tolist())
    assert {each["token_weight"] for each in plain["completions"]} == {1 / (64 * 4)}
    success = answered("maxrl")
    assert [each["advantage"] for each in success["completions"]] == pytest.approx(
        (rewards / rewards.mean() - 1).tolist()
    )
    dapo = answered("dapo", 1000)
    assert {each["token_weight"] for each in dapo["completions"]} == {1 / 100}
    learned = answered("expert-iteration")
    assert [each["trained_on"] for each in learned["completions"]] == [True, False, False, True]
    assert [each["token_weight"] for each in learned["completions"]] == [1 / 40, 0, 0, 1 / 40]
    assert reward_answer(RewardRequest(rewards="1 1", lengths="5 5"))["equal"] is True


@pytest.mark.parametrize(
    ("idea", "asked", "said"),
    [
        ("number-formats", {"value": "one"}, "'one' is not a number"),
        ("number-formats", {"bits": "01"}, "2 bits are given, and bf16 has 16"),
        ("number-formats", {"format": "fp5"}, "'fp5' is not a number format"),
        ("strides", {"steps": "x.T; x.exec()"}, "'x.exec()' is not a step"),
        ("strides", {"steps": ";".join(["x.T"] * 7)}, "there are 7 steps"),
        ("bpe", {"text": ""}, "the text is empty"),
        ("bpe", {"text": "\ud800"}, "surrogate"),
        ("pipelines", {"schedule": "1f1b", "ranks": 8, "micro_batches": 4}, "at least as many micro-batches"),
        ("pipelines", {"schedule": "9f9b"}, "'9f9b' is not a pipeline schedule"),
        ("collectives", {"device": "H1000"}, "H1000"),
        ("roofline", {"device": "A100-SXM-80GB", "format": "fp8"}, "fp8"),
        ("roofline", {"operator": "decoding", "heads": 6, "kv_heads": 4}, "6 heads do not divide among 4"),
        ("step-memory", {"d_model": 100}, "the width is 100"),
        ("isoflop", {"largest": 1e18}, "needs 3 budgets"),
        ("scaling-law", {"largest": 1e17}, "runs"),
        ("batching", {"requests": "12"}, "'12' is not a request"),
        ("batching", {"requests": "12+400", "blocks": 8}, "needs 103 blocks, and the cache has 8"),
        ("batching", {"requests": ""}, "there are 0 requests"),
        ("batching", {"preset": "deepseek-v3"}, "of another kind"),
        ("advantages", {"rewards": "1, x"}, "give numbers"),
        ("advantages", {"rewards": "1, 0", "lengths": "1"}, "lengths"),
        ("advantages", {"rewards": "1 nan", "lengths": "5 5"}, "finite"),
        ("advantages", {"algorithm": "ppo"}, "value head"),
    ],
)
def test_what_cannot_be_answered_is_named_in_a_line(idea: str, asked: dict, said: str) -> None:
    request = msgspec.convert(asked, IDEAS[idea].request)
    with pytest.raises(NapkinError) as error:
        IDEAS[idea].answer(request)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.thorough
@pytest.mark.parametrize("idea", IDEAS.values(), ids=lambda idea: idea.name)
def test_the_command_of_a_page_runs(idea: Idea, tmp_path: Path, server: subprocess.Popen[str]) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "text.txt").write_text("low lower lowest slow slower\n" * 50)
    program, *words = shlex.split(idea.command.replace("TEXT", "text.txt"))
    if program == "python":
        assert words[0] == "-c"
        exec(words[1], {})
        return
    if words[0] == "tune":
        # Its run would have to be trained first: the command is one that refuses what is not there.
        done = Napkin(tmp_path, server, tmp_path / "streams").run(*words)
        assert (done.status, "RUN" in done.err.read_text()) == (2, True)
        return
    done = Napkin(tmp_path, server, tmp_path / "streams").run(*words)
    assert done.status == 0, done.err.read_text()
