"""Clusters of texts equal those that brute force finds, in any memory."""

import random
from collections import defaultdict

import numpy as np

from napkin.curation.deduplication import MinHash, choose_banding, exact_duplicates, near_duplicates
from napkin.curation.deduplication.equal_keys import LEAST_MEMORY


def brute_force(keys: np.ndarray) -> list[list[int]]:
    """Connected components of the documents that are equal in some row."""
    count = keys.shape[1]
    neighbours = defaultdict(set)
    for row in keys:
        equal = row[:, None] == row[None, :]
        for i, j in np.argwhere(equal).tolist():
            neighbours[i].add(j)
    seen: set[int] = set()
    found = []
    for start in range(count):
        waiting, members = [start], set()
        while waiting:
            node = waiting.pop()
            if node not in members and node not in seen:
                members.add(node)
                waiting += neighbours[node]
        seen |= members
        if len(members) > 1:
            found.append(sorted(members))
    return found


def edited_texts(count: int) -> list[str]:
    """Texts, each an edit of some text before it or a new one."""
    draw = random.Random(3)
    texts: list[str] = []
    for _ in range(count):
        if texts and draw.random() < 0.6:
            words = draw.choice(texts).split()
            for _ in range(draw.randrange(4)):
                words[draw.randrange(len(words))] = f"new{draw.randrange(1000)}"
        else:
            words = [f"w{draw.randrange(2000)}" for _ in range(draw.randrange(20, 200))]
        texts.append(" ".join(words))
    return texts


def test_clusters_are_the_connected_components_of_documents_that_share_a_band() -> None:
    texts = edited_texts(400)
    keys = choose_banding(0.8, 128).keys(MinHash().signatures(texts)[0])
    expected = brute_force(keys)
    assert len(expected) > 20
    assert near_duplicates(iter(texts)) == expected


def test_equal_documents_are_found_through_white_space_alone() -> None:
    draw = random.Random(4)
    texts = ["".join(draw.choices("ab \n", k=5)) for _ in range(600)]
    by_words = defaultdict(list)
    for number, text in enumerate(texts):
        by_words[tuple(text.split())].append(number)
    assert exact_duplicates(texts) == [each for each in by_words.values() if len(each) > 1]


def test_what_does_not_fit_into_memory_is_sorted_in_files_with_the_same_result() -> None:
    draw = random.Random(5)
    # Most are one text, so that one key has more documents than fit.
    texts = ["same" if draw.random() < 0.8 else str(draw.randrange(30_000)) for _ in range(120_000)]
    assert exact_duplicates(texts, memory=2 * LEAST_MEMORY) == exact_duplicates(texts)


def test_texts_without_words_are_no_near_duplicates() -> None:
    assert near_duplicates(["", "...", " ", "a", "a!"]) == [[3, 4]]
    assert near_duplicates([]) == []
