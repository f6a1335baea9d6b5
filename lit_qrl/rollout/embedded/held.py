"""Keys and values that conversations keep from one turn to the next."""

from collections.abc import Sequence

from lit_qrl.rollout.embedded.cache import HeldRow, SlotCache
from lit_qrl.rollout.embedded.decode import Drawn, Piece
from lit_qrl.rollout.engine import Dialogue, Turn


class Held:
    """What is kept of the conversations of one dialogue; whatever does not fit is computed anew.

    Args:
        room: tokens of one sequence that fit into memory, in all caches together.
        keeps: False computes everything anew.
    """

    def __init__(self, room: int, keeps: bool = True) -> None:
        self.room, self.keeps = room, keeps
        self.rows: dict[int, HeldRow] = {}
        self.whole = True

    @property
    def tokens(self) -> int:
        """Tokens for which the caches that are kept have memory."""
        caches: dict[int, SlotCache] = {id(row.cache): row.cache for row in self.rows.values()}
        return sum(cache.capacity * cache.max_length for cache in caches.values())

    def drop(self) -> None:
        """Forget all of it, and keep nothing of the batch that is being drawn."""
        self.rows, self.whole = {}, False

    def make_room(self, dialogue: Dialogue, batches: Sequence[Sequence[Piece]], steps: int) -> None:
        """Forget what has ended, and everything where the next batches do not fit beside it.

        Args:
            dialogue: knows what has ended.
            batches: that are drawn next; several do not fit together, so that nothing of them is kept.
            steps: limit of their completions.
        """
        self.rows = {index: row for index, row in self.rows.items() if not dialogue.has_ended(index)}
        self.whole = self.keeps and len(batches) == 1
        wanted = max(sum(one.count for one in pieces) * (pieces[0].length + steps) for pieces in batches)
        if self.tokens + wanted > self.room:
            self.rows = {}

    def in_order(self, pieces: Sequence[Piece], turns: Sequence[Turn], n: int) -> list[Piece]:
        """Return the pieces of a batch so ordered that those stand together of which as many tokens are new."""
        rows = self.of(turns, n)
        held = {prompt: row.shared(turns[prompt * n].tokens) for prompt, row in rows.items()}
        return sorted(pieces, key=lambda piece: held.get(piece.prompt, 0) - piece.length)

    def of(self, turns: Sequence[Turn], n: int) -> dict[int, HeldRow]:
        """Return what is held of prompts, each of `n` turns, by their position."""
        found = ((i // n, self.rows.get(turn.index)) for i, turn in enumerate(turns))
        return {prompt: row for prompt, row in found if row is not None}

    def keep(self, turns: Sequence[Turn], n: int, pieces: Sequence[Piece], drawn: Drawn) -> None:
        """Keep what a batch has left in its cache.

        Args:
            turns: of the call, `n` for each prompt.
            n: completions of each prompt.
            pieces: of the batch.
            drawn: their tokens, and the cache.
        """
        if drawn.cache is None or drawn.places is None:
            return
        places, lengths, tokens = drawn.places.tolist(), drawn.length.tolist(), drawn.tokens.tolist()
        row = 0
        for piece in pieces:
            for number in range(piece.first, piece.first + piece.count):
                turn = turns[piece.prompt * n + number]
                ids = [*turn.tokens, *tokens[row][: lengths[row] - 1]]
                self.rows[turn.index] = HeldRow(drawn.cache, places[row], drawn.width - piece.length, ids)
                row += 1


def grouped(turns: Sequence[Turn]) -> tuple[list[Turn], int]:
    """Return turns so ordered that those with the same tokens stand together, and how many of each there are.

    Where their numbers differ, each counts for itself.

    >>> turns = [Turn(index=i, tokens=[token], max_tokens=4, seed=i) for i, token in enumerate([7, 8, 7, 8])]
    >>> [turn.index for turn in grouped(turns)[0]], grouped(turns)[1]
    ([0, 2, 1, 3], 2)
    """
    same: dict[tuple[int, ...], list[Turn]] = {}
    for turn in turns:
        same.setdefault(tuple(turn.tokens), []).append(turn)
    n = min(map(len, same.values())) if len({len(equal) for equal in same.values()}) == 1 else 1
    return [turn for equal in same.values() for turn in equal], n
