"""Deciding on duplicate documents: from the keys of all shards to the verdicts about each."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from napkin.curation.deduplication.clusters import Clusters, Numbers
from napkin.curation.deduplication.equal_keys import join_equal_keys, refuse_little_memory
from napkin.curation.deduplication.kept_documents import Keep, KeptDocuments, choose_kept
from napkin.curation.deduplication.key_file import KeyFile, open_key_files
from napkin.curation.deduplication.key_index import opened_index
from napkin.curation.deduplication.verdicts import write_verdicts


def decide_on_documents(
    stage: str,
    summaries: Sequence[Path],
    decisions: Sequence[Path],
    scratch: Path,
    memory: int,
    *,
    keep: Keep,
    index: str,
) -> None:
    """Write for each shard which of its documents are dropped, each with the identity of the one that stays instead.

    Documents that share a key, directly or through others, are a cluster, of which one stays. `memory` is in bytes, in
    addition to what the process has before. `index` is the folder of a `KeyIndex`, or empty.
    """
    refuse_little_memory(memory // 2)
    with opened_index(index, summaries) as known:
        earlier = known.earlier() if known else []
        n_earlier = sum(map(len, earlier))
        paths = [path for generation in earlier for path in generation] + list(summaries)
        generations = [number for number, paths in enumerate([*earlier, summaries]) for _ in paths]
        files = open_key_files(paths)
        clusters = Clusters(sum(map(len, files)), scratch, memory // 4)
        join_equal_keys(files, clusters, scratch, memory // 2)
        roots = clusters.roots()
        kept = choose_kept(files, generations, roots, keep, scratch, memory * 3 // 4)
        starts = np.cumsum([0, *map(len, files)]).tolist()
        for number, decision in enumerate(decisions, n_earlier):
            verdicts = _verdicts_of(number, files, starts, roots, kept)
            write_verdicts(decision, stage, len(files[number]), verdicts)
        if known:
            known.extend()


def _verdicts_of(
    number: int, files: Sequence[KeyFile], starts: Sequence[int], roots: Numbers, kept: KeptDocuments
) -> Iterator[tuple[int, str]]:
    @lru_cache(maxsize=4096)
    def identity(document: int) -> str:
        place = bisect_right(starts, document) - 1
        return files[place].identity(document - starts[place])

    begin = starts[number]
    for first, last in pairwise(files[number].starts.tolist()):
        for document, other in kept.dropped(begin + first, roots[begin + first : begin + last]):
            yield document - begin, identity(other)
