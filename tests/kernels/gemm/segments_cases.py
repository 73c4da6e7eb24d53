"""`grouped_layout`s of all kinds, and the list of their segments, by plain loops."""

import random

BLOCK = 128


def list_of(group_of_row: list[int], num_groups: int) -> list[int]:
    """What `segments.cu` writes, row by row: where a row is of a group, it has a segment."""
    found: list[list[int]] = []
    for row, group in enumerate(group_of_row):
        if not 0 <= group < num_groups:
            continue
        if found and found[-1][1:3] == [row, group]:
            found[-1][1] = row + 1
        else:
            found.append([row, row + 1, group, 0])
    num_blocks = -(-len(group_of_row) // BLOCK)
    entries = found + [[0, 0, 0, 0]] * (num_blocks - len(found))
    return [len(found), 0, 0, 0, *(x for entry in entries for x in entry)]


def layout_of(blocks: list[tuple[int, int]], last: int = BLOCK) -> list[int]:
    """blocks: (group, how many rows are of it) of each; the last one has `last` rows."""
    rows = [group if i < count else -1 for group, count in blocks for i in range(BLOCK)]
    return rows[: len(rows) - BLOCK + last]


FULL, NO = BLOCK, (-1, 0)
LAYOUTS = {
    "one row": layout_of([(0, 1)], 1),
    "one row of none": layout_of([NO], 1),
    "a full block": layout_of([(2, FULL)]),
    "none": layout_of([NO] * 5),
    "one group": layout_of([(1, FULL)] * 7, 3),
    "a group goes on": layout_of([(2, FULL), (2, FULL), (2, 5), (0, FULL), (0, 1)]),
    "the same group after its end": layout_of([(1, FULL), (1, 127), (1, FULL), (1, 4)]),
    "the same group after another": layout_of([(1, FULL), (0, FULL), (1, FULL)]),
    "blocks of none between": layout_of([(1, FULL), NO, (1, 3), NO, NO, (0, 9), NO]),
    "falling": layout_of([(3, 1), (2, FULL), (2, 64), (1, 65), (0, FULL)]),
    "no such group": layout_of([(4, FULL), (4, FULL), (0, 3), (-7, 4), (2**31 - 1, 7), (3, 2)]),
    "rows of none first": layout_of([(1, FULL), (-2, FULL), (-(2**31), 9), (1, 32)], 33),
    "a last block of one row": layout_of([(1, FULL), (1, FULL)], 1),
    "a last block that is not full": layout_of([(0, FULL), (1, 96)], 97),
}
NUM_GROUPS = 4


def random_layout(num_blocks: int, num_groups: int, seed: int) -> list[int]:
    """Segments of a few blocks; about a third end within a block, and some blocks are of none."""
    draw = random.Random(seed)
    blocks: list[tuple[int, int]] = []
    while len(blocks) < num_blocks:
        group = draw.randrange(-1, num_groups)
        blocks += [(group, FULL)] * draw.choice((0, 0, 1, 2, 9, 70))
        blocks += [(group, draw.randrange(1, FULL + 1))] * draw.choice((0, 1))
    return layout_of(blocks[:num_blocks], draw.randrange(1, FULL + 1))
