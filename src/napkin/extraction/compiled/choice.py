"""The choice among the blocks of a page that has the least energy: a label, kept or not, for each element and block.

A kept block gives its gain. Each element whose label differs from that of the element around it costs `switch`, and a
block that differs from its element `block_switch`: what is kept hangs together, and so does what is left out. On a
tree the least energy is found exactly, by going up once and down once (dynamic programming).
"""

from typing import Any

from napkin.extraction.compiled import fields as f
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import i64_at


@CompiledFunction
def choose_blocks(
    elements: Any, n_elements: Any, blocks: Any, n_blocks: Any, gains: Any, costs: Any, switch: Any, block_switch: Any
) -> None:
    """Replace the gain of each block by 1 if it is kept, else by 0.

    `costs` has room for two int64 per element: its least energy if it is left out, and if it is kept. The document as a
    whole is left out.
    """
    rows, texts, gain, cost = i64_at(elements), i64_at(blocks), i64_at(gains), i64_at(costs)
    for k in range(2 * n_elements):
        cost[k] = 0
    for k in range(n_blocks):
        element = texts[k * f.N_BLOCK + f.ELEMENT]
        cost[2 * element] += min(0, block_switch - gain[k])
        cost[2 * element + 1] += min(block_switch, -gain[k])
    for k in range(n_elements - 1, 0, -1):
        above = rows[k * f.N_ELEMENT + f.PARENT]
        out, kept = cost[2 * k], cost[2 * k + 1]
        cost[2 * above] += min(out, kept + switch)
        cost[2 * above + 1] += min(kept, out + switch)
    # Downwards: the first cost of an element becomes its label.
    cost[0] = 0
    for k in range(1, n_elements):
        out, kept = cost[2 * k], cost[2 * k + 1]
        if cost[2 * rows[k * f.N_ELEMENT + f.PARENT]] == 1:
            cost[2 * k] = 1 if kept <= out + switch else 0
        else:
            cost[2 * k] = 1 if kept + switch < out else 0
    for k in range(n_blocks):
        if cost[2 * texts[k * f.N_BLOCK + f.ELEMENT]] == 1:
            gain[k] = 1 if -gain[k] <= block_switch else 0
        else:
            gain[k] = 1 if gain[k] > block_switch else 0
