"""Page tables and query rows by plain Python loops, from the definitions alone."""

import numpy as np


def table_row(slots, length, page_size, max_pages):
    """Row of the page table of a sequence of `length` tokens whose slots are listed in `slots`."""
    pages = (length + page_size - 1) // page_size
    if pages > max_pages:
        return [-1] * max_pages
    row = [0] * max_pages
    for page in range(pages):
        positions = range(page * page_size, min((page + 1) * page_size, length))
        run = [int(slots[p]) if p < len(slots) else -1 for p in positions]
        first, last = run[0], run[-1]
        whole = first >= 0 and first % page_size == 0 and (last < 0 or last - first == len(run) - 1)
        row[page] = first // page_size if whole else -1
    return row


def page_table(rows, lengths, page_size, max_pages):
    table = [table_row(row, n, page_size, max_pages) for row, n in zip(rows, lengths, strict=True)]
    return np.array(table, np.int64).reshape(len(rows), max_pages)


def translate(rows, full_to_swa):
    """Window-pool slots of rows of full-pool slots."""

    def one(slot):
        return max(int(full_to_swa[slot]), -1) if 0 <= slot < len(full_to_swa) else -1

    return [[one(int(slot)) for slot in row] for row in rows]


def is_aligned(slots, length, page_size):
    """Whether every known slot has its position's offset, and the same page as the others of its logical page."""
    for start in range(0, length, page_size):
        pages = set()
        for p in range(start, min(start + page_size, length)):
            slot = int(slots[p]) if p < len(slots) else -1
            if slot >= 0:
                if slot % page_size != p % page_size:
                    return False
                pages.add(slot // page_size)
        if len(pages) > 1:
            return False
    return True


def query_rows(table, q_lens, seqused_k, page_size, num_tokens, depths=None):
    """(sequence_ids, positions, slots) of a token buffer of `num_tokens` rows."""
    sequence_ids, positions, slots = [-1] * num_tokens, [0] * num_tokens, [-1] * num_tokens
    row = 0
    for s, (q_len, length) in enumerate(zip(q_lens, seqused_k, strict=True)):
        for i in range(q_len):
            if length > 0:
                key = length - q_len + i
                sequence_ids[row] = s
                positions[row] = key if depths is None else length - q_len + int(depths[row])
                page = key // page_size
                if 0 <= page < len(table[s]) and table[s][page] >= 0:
                    slots[row] = int(table[s][page]) * page_size + key % page_size
            row += 1
    return sequence_ids, positions, slots


def constant_q_lens(live, q_len):
    """Query rows of each sequence: none behind the last live one."""
    last = max((s for s, alive in enumerate(live) if alive), default=-1)
    return [q_len if s <= last else 0 for s in range(len(live))]
