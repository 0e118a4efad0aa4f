"""Union-find over an array of parents, compiled (Tarjan 1975): a parent is never larger than its child, and a root is
its own parent, so that each cluster is named by its smallest member, in whatever order its pairs come."""

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import i64_at


@CompiledFunction
def join_pairs(parents, first, second, n_pairs):
    """Join the clusters of first[i] and second[i]."""
    parents_, first_, second_ = i64_at(parents), i64_at(first), i64_at(second)
    for i in range(n_pairs):
        a, b = _root(parents_, first_[i]), _root(parents_, second_[i])
        if a < b:
            parents_[b] = a
        elif b < a:
            parents_[a] = b


@CompiledFunction
def flatten(parents, n):
    """parents[i] = the root of i."""
    parents_ = i64_at(parents)
    # Parents come before their children, so the parent's is a root already.
    for i in range(n):
        parents_[i] = parents_[parents_[i]]


@jitted
def _root(parents, i):
    while parents[i] != i:
        parents[i] = parents[parents[i]]
        i = parents[i]
    return i
