"""A list of requests through the engine's scheduler, step by step: batches that wait for their longest member beside
continuous batching, and the blocks of the KV cache that they hold."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from napkin.accounting.rules import kv_cache_bytes_rule
from napkin.errors import NapkinError
from napkin.inference.scheduler import ScheduledSequence, Scheduler
from napkin.model.config import ModelConfig, preset, presets
from napkin.studio.learn.idea import Idea

MOST_REQUESTS = 40
LONGEST = 500
"""Tokens of a prompt or of an answer."""


class BatchingRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Requests, each of prompt and answer tokens, and the engine's sizes."""

    requests: Annotated[str, msgspec.Meta(max_length=1000)] = "12+40 30+8 8+12 20+60 10+6 16+24 40+10 8+30 12+16 24+20"
    slots: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4
    prefill_chunk: Annotated[int, msgspec.Meta(ge=1, le=512)] = 16
    blocks: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    block_size: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    preset: str = "llama-3-8b"
    """The published model for the bytes of keys and values."""


def batching_answer(asked: BatchingRequest) -> dict[str, Any]:
    """Both timelines, and what a token of a model takes in the cache.

    Raises NapkinError for a request that does not fit into the cache, and for a text that is no list of requests.
    """
    requests = _requests(asked)
    model = preset(asked.preset)
    if not _has_ordinary_cache(model):
        raise NapkinError(f"the cache of {asked.preset} is of another kind: use one of {', '.join(_models())}")
    per_token = kv_cache_bytes_rule(
        n_layers=model.n_layers,
        n_kv_heads=model.n_kv_heads or model.n_heads,
        head_dim=model.head_dim or model.d_model // model.n_heads,
        context_length=1,
    )
    return {
        "static": simulated(asked, requests, static=True),
        "continuous": simulated(asked, requests, static=False),
        "requests": requests,
        "bytes_per_token": per_token,
    }


def _has_ordinary_cache(model: ModelConfig) -> bool:
    """True where each layer keeps keys and values of its own for each token."""
    return model.kv_lora_rank is None and model.kv_sharing == 1 and model.mixers == "attention"


def _models() -> list[str]:
    return [name for name, each in presets().items() if _has_ordinary_cache(each.model)]


def _requests(asked: BatchingRequest) -> list[tuple[int, int]]:
    """(prompt, answer) tokens of each request."""
    requests = []
    for text in asked.requests.replace(",", " ").split():
        prompt, _, answer = text.partition("+")
        if not (prompt.isdecimal() and answer.isdecimal()):
            raise NapkinError(f"'{text[:40]}' is not a request: write prompt+answer tokens, as 12+40")
        sizes = int(prompt), int(answer)
        if not all(1 <= each <= LONGEST for each in sizes):
            raise NapkinError(f"the request {text[:40]} is out of bounds: use 1 to {LONGEST} tokens")
        needed = -(-sum(sizes) // asked.block_size)
        if needed > asked.blocks:
            raise NapkinError(f"the request {text} needs {needed} blocks, and the cache has {asked.blocks}: use more")
        requests.append(sizes)
    if not 1 <= len(requests) <= MOST_REQUESTS:
        raise NapkinError(f"there are {len(requests)} requests: give 1 to {MOST_REQUESTS}")
    return requests


def simulated(asked: BatchingRequest, requests: Sequence[tuple[int, int]], *, static: bool) -> dict[str, Any]:
    """Run the engine's scheduler on requests that come at once; with `static`, the next ones are let in when all
    before them are done.

    `spans` are (slot, request, "prefill" or "decode", first step, step after the last), `blocks` those in use after
    each step.
    """
    scheduler = Scheduler[ScheduledSequence](
        asked.blocks,
        block_size=asked.block_size,
        max_running=asked.slots,
        prefill_chunk=asked.prefill_chunk,
        shares_prefixes=False,
    )
    queue = [
        ScheduledSequence(number, [0] * prompt, prompt, answer) for number, (prompt, answer) in enumerate(requests)
    ]
    slot_of: dict[int, int] = {}
    done_at = [0] * len(requests)
    did: list[dict[int, str]] = []
    blocks: list[int] = []
    while queue or scheduler.waiting or scheduler.running:
        if not static or not (scheduler.waiting or scheduler.running):
            for sequence in queue[: asked.slots if static else None]:
                scheduler.add(sequence)
            queue = queue[asked.slots :] if static else []
        for sequence in scheduler.admit():
            slot_of[sequence.number] = min(set(range(asked.slots)) - set(slot_of.values()))
        step: dict[int, str] = {}
        finished = []
        for each in scheduler.passes():
            kind = "decode" if each.sequences[0].decodes else "prefill"
            for sequence in each.sequences:
                step[sequence.number] = f"{slot_of[sequence.number]} {kind}"
                scheduler.advance(sequence, each.n_new)
                if sequence.n_computed == len(sequence.tokens):
                    sequence.tokens.append(0)
                    if not sequence.wants_more:
                        finished.append(sequence)
                        scheduler.finish(sequence)
        did.append(step)
        blocks.append(asked.blocks - scheduler.pool.n_free + sum(len(each.table) for each in finished))
        running = {sequence.number for sequence in scheduler.running}
        slot_of = {number: slot for number, slot in slot_of.items() if number in running}
        for sequence in finished:
            done_at[sequence.number] = len(did)
    busy = sum(map(len, did))
    return {
        "steps": len(did),
        "spans": _spans(did),
        "blocks": blocks,
        "done_at": done_at,
        "busy": busy / (len(did) * asked.slots),
        "tokens_per_step": sum(answer for _, answer in requests) / len(did),
        "preempted": scheduler.preempted,
    }


def _spans(did: Sequence[dict[int, str]]) -> list[tuple[int, int, str, int, int]]:
    """The activity of each request, with consecutive steps of one kind joined."""
    spans: list[tuple[int, int, str, int, int]] = []
    open_: dict[int, tuple[str, int]] = {}
    for step, now in enumerate([*did, {}]):
        for number, (kind, begin) in list(open_.items()):
            if now.get(number) != kind:
                slot, _, name = kind.partition(" ")
                spans.append((int(slot), number, name, begin, step))
                del open_[number]
        for number, kind in now.items():
            open_.setdefault(number, (kind, step))
    return spans


BATCHING = Idea(
    name="batching",
    title="The KV cache and continuous batching",
    summary="A list of requests through the engine's scheduler: the slots over time, static and continuous.",
    text=(
        "A model writes one token per step, and reads all of its weights for it. So a step with several sequences "
        "costs hardly more than a step with one, and a server wants all of its slots busy. The keys and values of "
        "earlier tokens are kept in a cache, in blocks; they limit how many sequences run at once.",
        "With static batching a batch ends with its longest answer, and the slots of shorter ones stay empty. With "
        "continuous batching a request takes a slot as soon as one is free, and its prompt is computed in chunks "
        "beside the sequences that decode. If blocks run out, the request that came last releases its blocks and "
        "is computed again.",
    ),
    formula="cache bytes per token = 2 · layers · KV heads · head width · bytes per number\n"
    "busy = slots with a token computed / (slots · steps)",
    command="napkin plan service --preset llama-3-8b --on H100 --concurrency 64",
    files=("inference/scheduler.py", "inference/engine.py", "inference/paged_cache.py"),
    request=BatchingRequest,
    answer=batching_answer,
)
