"""Draws legal plans, part by part, against a naive model that is kept up to date."""

import random

from paged_jax.plan import Plan, Segment
from tests.core.naive import Naive

# The parts of a plan in its order.
PARTS = ("free", "release", "retain", "share", "fork", "reindex", "truncate", "allocate")
MOST_TOKENS = 10  # of one row in a plan that can succeed
FORKS, SHARES, IDS = 3, 2, 6


class History:
    """The naive model, and the tags that each row and each retained block must hold.

    Drawing a part applies it, so that the next part is legal. Tags are written by the caller.
    """

    def __init__(self, num_blocks: int, block_size: int, max_seqs: int, width: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_seqs, self.width = max_seqs, width
        self.naive = Naive(num_blocks, block_size, max_seqs, width)
        self.tags = [[] for _ in range(max_seqs)]  # per row, in order of position
        self.frozen = {}  # retained block to its tags
        self.rows = list(range(max_seqs))

    def draw(self, rng: random.Random, parts) -> dict:
        return {part: getattr(self, part)(rng) for part in PARTS if part in parts}

    def free(self, rng):
        rows = self.some_rows(rng, 2)
        self.naive.free(rows)
        for row in rows:
            self.tags[row] = []
        return rows

    def release(self, rng):
        held = self.naive.retained
        ids = rng.sample(held, rng.randint(0, min(IDS, len(held))))
        self.naive.release(ids)
        self.frozen = {block: self.frozen[block] for block in self.naive.retained}
        return ids

    def retain(self, rng):
        """Blocks of one row, as a prefix cache takes them, or any that are owned."""
        # Half of the pool at most, or else the rows would soon starve.
        most = min(IDS, max(0, self.num_blocks // 2 - len(self.naive.retained)))
        ids = self.naive.tables[rng.choice(self.rows)][:most]
        owned = self.naive.owned()
        if owned and rng.random() < 0.3:
            ids = rng.choices(owned, k=rng.randint(0, most))
        self.frozen.update({block: self.known(block) for block in ids})
        self.naive.retain(ids)
        return list(ids)

    def share(self, rng):
        """Blocks of one row, or full blocks of any owner and one that need not be full."""
        entries = []
        for row in self.empty_rows()[:SHARES]:
            ids = self.naive.tables[rng.choice(self.rows)]
            if rng.random() < 0.5:
                owned = self.naive.owned()
                full = [block for block in owned if len(self.known(block)) == self.block_size]
                ids = rng.sample(full, rng.randint(0, min(self.width - 1, len(full))))
                others = [block for block in owned if block not in ids]
                ids += rng.sample(others, min(1, len(others)))
            tags = [tag for block in ids for tag in self.known(block)]
            tags = tags[: rng.randint(0, len(tags))]
            ids = ids[: len(range(0, len(tags), self.block_size))]
            self.naive.share(row, ids, len(tags))
            self.tags[row] = tags
            entries.append((row, tuple(ids), len(tags)))
        return entries

    def fork(self, rng):
        """A child may be the parent of the next pair, and a parent may be empty."""
        pairs = []
        for _ in range(rng.randint(1, FORKS)):
            empty = self.empty_rows()
            if empty:
                parent, child = rng.choice(self.rows), rng.choice(empty)
                self.naive.fork(parent, child)
                self.tags[child] = list(self.tags[parent])
                pairs.append((parent, child))
        return pairs

    def reindex(self, rng):
        rows = self.some_rows(rng, self.max_seqs)
        is_permutation = rng.random() < 0.3
        sources = (
            rng.sample(rows, len(rows)) if is_permutation else rng.choices(self.rows, k=len(rows))
        )
        pairs = list(zip(rows, sources, strict=True))
        self.naive.reindex(dict(pairs))
        before = list(self.tags)
        for row, source in pairs:
            self.tags[row] = list(before[source])
        return pairs

    def truncate(self, rng):
        kept = {row: rng.randint(0, len(self.tags[row]) + 1) for row in self.some_rows(rng, 2)}
        for row, length in kept.items():
            self.tags[row] = self.tags[row][:length]
        self.naive.truncate(kept)
        return list(kept.items())

    def allocate(self, rng):
        """A few rows, one token or many each; mostly no more than their tables can hold."""
        most = rng.choice([1, 1, 3, MOST_TOKENS])
        new_tokens = {row: rng.randint(0, most) for row in self.some_rows(rng, self.max_seqs)}
        room = {row: self.width * self.block_size - len(self.tags[row]) for row in new_tokens}
        if rng.random() < 0.9:
            return {row: min(count, room[row]) for row, count in new_tokens.items()}
        return {row: rng.choice([count, room[row] + 1]) for row, count in new_tokens.items()}

    def some_rows(self, rng, most):
        return rng.sample(self.rows, rng.randint(0, most))

    def empty_rows(self):
        return [row for row in self.rows if not self.tags[row]]

    def known(self, block):
        """The most tags that an owner of the block can read from it."""
        seen = [self.frozen.get(block, [])]
        for row, table in self.naive.tables.items():
            for logical, held in enumerate(table):
                if held == block:
                    start = logical * self.block_size
                    seen.append(self.tags[row][start : start + self.block_size])
        return max(seen, key=len)


def plan_of(drawn: dict) -> Plan:
    return Plan(
        free_rows=tuple(drawn.get("free", ())),
        release_ids=tuple(drawn.get("release", ())),
        retain_ids=tuple(drawn.get("retain", ())),
        shares=tuple(drawn.get("share", ())),
        forks=tuple(drawn.get("fork", ())),
        reindexed=tuple(drawn.get("reindex", ())),
        truncated=tuple(drawn.get("truncate", ())),
        segments=tuple(
            Segment(
                request_id="",
                row=row,
                start=0,
                num_tokens=count,
                is_decode=count == 1,
                is_sampled=True,
                is_admission=False,
            )
            for row, count in drawn.get("allocate", {}).items()
        ),
    )
