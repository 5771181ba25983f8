"""The rules of the block state a third time, as plainly and slowly as possible.

Written from the words of the contract and sharing nothing with core or the ledger. It keeps no
counts: who owns a block is found by looking through all rows and all retained ids. It checks
nothing: what it is asked to do is legal.
"""

from dataclasses import dataclass, field

OUTSIDE = "an owner that is not a row"
REASON_OUT_OF_BLOCKS, REASON_ROW_TOO_LONG = 1, 2


@dataclass
class Answer:
    reason: int
    needed: int = 0  # blocks, copies included
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)  # row to (source, target)


class Naive:
    def __init__(self, num_blocks: int, block_size: int, max_seqs: int, width: int):
        self.block_size, self.width = block_size, width
        self.stack = list(range(num_blocks, 0, -1))  # the last one is the top
        self.tables = {row: [] for row in range(max_seqs)}
        self.lengths = dict.fromkeys(self.tables, 0)
        self.retained = []

    def owners(self, block):
        """Every owner, as often as it names the block."""
        rows = [row for row, table in self.tables.items() for held in table if held == block]
        return rows + [OUTSIDE for held in self.retained if held == block]

    def owned(self):
        return sorted(
            {block for table in self.tables.values() for block in table}.union(self.retained)
        )

    def give_back(self, block):
        """To be called after an owner has let go of the block."""
        if not self.owners(block):
            self.stack.append(block)

    def truncate(self, lengths):
        for row in sorted(lengths):
            if lengths[row] < self.lengths[row]:
                self.lengths[row] = lengths[row]
                first_dropped = len(range(0, lengths[row], self.block_size))
                while self.tables[row][first_dropped:]:
                    self.give_back(self.tables[row].pop(first_dropped))

    def free(self, rows):
        self.truncate(dict.fromkeys(rows, 0))

    def fork(self, parent, child):
        self.share(child, self.tables[parent], self.lengths[parent])

    def share(self, row, block_ids, num_tokens):
        self.tables[row], self.lengths[row] = list(block_ids), num_tokens

    def reindex(self, sources):
        lengths = {row: self.lengths[source] for row, source in sources.items()}
        for row, source in sources.items():
            # The new tables own their blocks before the old ones let go of theirs.
            self.tables["next", row] = list(self.tables[source])
        self.free(sources)
        for row in sources:
            self.share(row, self.tables.pop(("next", row)), lengths[row])

    def retain(self, block_ids):
        self.retained += block_ids

    def release(self, block_ids):
        for block in block_ids:
            self.retained.remove(block)
            self.give_back(block)

    def allocate(self, new_tokens, most=None):
        after = {row: self.lengths[row] + count for row, count in new_tokens.items()}
        if any(length > self.width * self.block_size for length in after.values()):
            return Answer(REASON_ROW_TOO_LONG)
        places = []  # (row, logical block), in the order in which blocks are handed out
        for row in sorted(new_tokens):
            covered = range(0, after[row], self.block_size)
            places += [(row, logical) for logical in range(len(self.tables[row]), len(covered))]
        for row in sorted(new_tokens):
            if self.must_copy(row, new_tokens):
                places.append((row, len(self.tables[row]) - 1))
        if len(places) > len(self.stack) or (most is not None and len(places) > most):
            return Answer(REASON_OUT_OF_BLOCKS, len(places))
        copies = {}
        for row, logical in places:
            block, table = self.stack.pop(), self.tables[row]
            if logical < len(table):
                copies[row] = (table[logical], block)
                table[logical] = block
            else:
                table.append(block)
        self.lengths.update(after)
        return Answer(0, len(places), copies)

    def must_copy(self, row, new_tokens):
        if not self.writes_into_a_block(row, new_tokens):
            return False
        block = self.tables[row][-1]
        owners = self.owners(block)
        if owners == [row]:
            return False
        writers = [
            other
            for other in owners
            if other != OUTSIDE
            and self.writes_into_a_block(other, new_tokens)
            and self.tables[other][-1] == block
        ]
        return row != min(writers) if writers == owners else True

    def writes_into_a_block(self, row, new_tokens):
        return new_tokens.get(row, 0) > 0 and self.lengths[row] % self.block_size != 0
