"""Decoding in slots: steps of fixed shapes, replayed as CUDA graphs, and ended rows refilled from a queue.

The host never waits for a step. It looks at which rows have ended a few steps after the device knows, so that a row's
slot goes on for some steps after its end; what is computed there is written nowhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lit_qrl.network.structure import body, cached
from lit_qrl.rollout.embedded.attention import mask_of
from lit_qrl.rollout.embedded.cache import SlotCache
from lit_qrl.rollout.embedded.decode import PREFILL_TOKENS, Decoder, Drawn, Piece, Random
from lit_qrl.rollout.embedded.flight import Flight
from lit_qrl.rollout.embedded.leaving import Gone, Leaving
from lit_qrl.rollout.embedded.step_cache import StepCache
from lit_qrl.rollout.graphs import Trust, recorded

CHECK = 4
"""Steps between two looks at which rows have ended, each at what was so at the look before."""
REFILL = 8
"""One slot in so many is free before the next prompts are prefilled, since a prefill holds up all rows."""
NARROW = 4
"""Rows get fewer where one slot in so many is left: a smaller step saves little, and recording it takes that of ten."""


def sizes_of(slots: int) -> list[int]:
    """Return the numbers of rows that steps are made for: all slots, and the powers of two below.

    >>> sizes_of(12)
    [12, 8, 4, 2, 1]
    """
    return [slots, *(2**power for power in range(slots.bit_length() - 1, -1, -1) if 2**power < slots)]


@dataclass(slots=True)
class Rows:
    """What some slots are at, each " s" on the device; steps write over it.

    Args:
        token: the last one drawn, which the next step takes in.
        column: of the cache, where it goes; its position too.
        row: of the results, that the slot draws.
        drawn: tokens of that row.
        ended: whether they are all there are.
    """

    token: Tensor
    column: Tensor
    row: Tensor
    drawn: Tensor
    ended: Tensor

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> "Rows":
        """Return slots of which none is used."""
        token, column, row, drawn = torch.zeros(4, slots, dtype=torch.long, device=device)
        return cls(token, column, row, drawn, torch.ones(slots, dtype=torch.bool, device=device))

    def first(self, count: int) -> "Rows":
        """Return the first slots, in the same memory."""
        return Rows(*(getattr(self, field.name)[:count] for field in fields(self)))

    def put(self, slots: Tensor, rows: "Rows") -> None:
        """Write over some slots."""
        for field in fields(self):
            getattr(self, field.name).index_copy_(0, slots, getattr(rows, field.name))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots over others."""
        self.put(targets, Rows(*(getattr(self, field.name).index_select(0, sources) for field in fields(self))))


@dataclass(slots=True)
class Seat:
    """What the host knows of a slot in use.

    Args:
        row: of the results.
        due: the step by which it has ended in any case.
    """

    row: int
    due: int


@dataclass(slots=True)
class Look:
    """What the device will have said of its slots.

    Args:
        found: "2 s", whether a slot has ended, and how many tokens it has drawn.
        rows: of the results, that each slot drew then.
        done: the copy; None where there is nothing to wait for.
    """

    found: Tensor
    rows: list[int | None]
    done: torch.cuda.Event | None


@dataclass(slots=True)
class Prefilled:
    """Prompts whose keys and values are known.

    Args:
        prompts: their positions in the call.
        cache: one row each.
        logits: "p v" of their first tokens.
    """

    prompts: list[int]
    cache: SlotCache
    logits: Tensor


class SlotDecoder:
    """Draws one call's completions in slots; made anew for each call.

    Args:
        decoder: the model, its head and how tokens are drawn.
        slots: rows that are decoded at once.
        trust: what is known of recorded steps, and the memory of former ones; a CPU launches every step.
    """

    def __init__(self, decoder: Decoder, slots: int, trust: Trust) -> None:
        self.model, self.slots, self.trust = decoder, slots, trust
        self.device, self.steps = decoder.device, decoder.sampling.max_tokens
        self.size, self.now, self._replays = slots, 0, self.device.type == "cuda"
        self.state = Rows.empty(slots, self.device)
        self.seats: list[Seat | None] = [None] * slots
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.warm: set[int] = set()
        self._held: Prefilled | None = None
        self.versions: Tensor | None = None
        self._version = torch.zeros((), dtype=torch.long, device=self.device)
        self._staging = [torch.empty(2, slots, dtype=torch.long, pin_memory=self._replays) for _ in range(2)]

    # A tensor of inference mode cannot tell that it was not written to, so that layers would not share its codes.
    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        pieces: Sequence[Piece],
        random: Random,
        report: Callable[[int, int], None],
        gone: Gone | None = None,
    ) -> Drawn:
        """Return the completions of all pieces, which take the slots in their order.

        Args:
            prompts: all prompts of the call.
            pieces: what to draw.
            random: what the tokens are drawn with; not asked for where decoding is greedy.
            report: called now and then with (sequences ended, tokens drawn).
            gone: takes rows that have ended while others are drawn; not all of them.
        """
        self.prompts, self.owner = prompts, [p.prompt for p in pieces for _ in range(p.count)]
        total = len(self.owner)
        self._allocate(total, max(piece.length for piece in pieces))
        self.numbers = None
        if not self.model.sampler.greedy:
            parts = [random(p.prompt, self.steps)[p.first : p.first + p.count] for p in pieces]
            self.numbers = torch.cat(parts).to(self.device)
        drawn = Drawn(self.tokens[:-1], self.logprobs[:-1], self.length[:-1], self.stopped[:-1])
        drawn.versions = None if self.versions is None else self.versions[:-1]
        leaving = None if gone is None else Leaving(drawn, gone)
        counts, ended, waiting = [0] * total, 0, 0
        look: Look | None = None
        while True:
            free = [slot for slot, seat in enumerate(self.seats) if seat is None]
            share = min(total - waiting, len(free))
            if share and (share == total - waiting or len(free) * REFILL >= self.slots):
                self._refill(free[:share], waiting)
                waiting += share
            if not any(self.seats):
                break
            if waiting == total:
                self._narrow()
            if self.model.flight is not None and self.model.flight.changed():
                self._renew(self.model.flight)
            until = min(self.now + CHECK, *(seat.due for seat in self.seats if seat is not None))
            while self.now < until:
                self._advance()
                self.now += 1
            latest = self._look()
            over = set() if look is None else self._read(look, counts)
            look = latest
            rows = []
            for slot, seat in enumerate(self.seats):
                if seat is not None and (seat.row in over or seat.due <= self.now):
                    self.seats[slot] = None
                    rows.append(seat.row)
            ended += len(rows)
            report(ended, sum(counts))
            if leaving is not None:
                leaving.hand()
                if rows:
                    leaving.take(rows, self._on(rows))
        report(total, int(drawn.length.sum()))
        return drawn

    def _allocate(self, rows: int, width: int) -> None:
        """Make the results, with one row more for what is drawn after a row's end, and the cache."""
        self.cache = StepCache(self.model.layers, self.slots, width + self.steps, self.model.rounding)
        self.tokens = torch.zeros(rows + 1, self.steps, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(rows + 1, self.steps, dtype=torch.float32, device=self.device)
        self.length = torch.full((rows + 1,), self.steps, device=self.device)
        self.stopped = torch.zeros(rows + 1, dtype=torch.bool, device=self.device)
        if self.model.flight is not None:
            self.versions = torch.zeros(rows + 1, self.steps, dtype=torch.long, device=self.device)
            self._version.fill_(self.model.flight.version)

    def _renew(self, flight: Flight) -> None:
        """Go on with other weights: what was recorded reads the memory of the old ones."""
        self._version.fill_(flight.version)
        self.graphs.clear()
        self.warm.clear()
        self._held = None
        if not flight.recompute:
            return
        drawn, tokens = self.state.drawn.tolist(), self.tokens.tolist()
        live = [(slot, seat.row) for slot, seat in enumerate(self.seats) if seat is not None]
        while live:
            # A slot's last token is not in its cache yet: the next step takes it in.
            known = {slot: [*self.prompts[self.owner[row]], *tokens[row][: drawn[slot] - 1]] for slot, row in live}
            share = max(1, PREFILL_TOKENS // max(map(len, known.values())))
            chosen, live = [slot for slot, _ in live[:share]], live[share:]
            filled = self._prefilled(chosen, [known[slot] for slot in chosen])
            self.cache.place(filled.cache, self._on(list(range(len(chosen)))), self._on(chosen))

    # -------------------------------------------------------------------------------------------------------- prompts

    def _refill(self, slots: Sequence[int], first: int) -> None:
        """Begin the next rows in free slots.

        Args:
            slots: which.
            first: of the rows.
        """
        owners = self.owner[first : first + len(slots)]
        wanted = list(dict.fromkeys(owners))
        shares = [] if self._held is None or self._held.prompts[-1] != wanted[0] else [self._held]
        wanted = wanted[len(shares) :]
        while wanted:
            share = max(1, PREFILL_TOKENS // max(len(self.prompts[prompt]) for prompt in wanted))
            shares.append(self._prefilled(wanted[:share], [self.prompts[prompt] for prompt in wanted[:share]]))
            wanted = wanted[share:]
        done = 0
        for share in shares:
            of = [owner for owner in owners[done:] if owner in share.prompts]
            self._begin(share, of, slots[done : done + len(of)], first + done)
            done += len(of)
        self._held = shares[-1]

    def _prefilled(self, numbers: list[int], prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Compute some prompts, each from column 0 on."""
        width = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        cache = SlotCache(self.model.layers, len(prompts), width, self.model.rounding)
        states = body(self.model.network)(
            input_ids=self._on(tokens),
            attention_mask=None,  # what stands behind a prompt's end is seen by nothing before it
            position_ids=torch.arange(width, device=self.device).expand(len(prompts), width),
            **cached(self.model.network, cache),
        ).last_hidden_state
        cache.filled = width
        ends = self._on([len(prompt) - 1 for prompt in prompts])
        last = states[torch.arange(len(prompts), device=self.device), ends]
        return Prefilled(numbers, cache, self.model.head.logits(last))

    def _begin(self, share: Prefilled, owners: Sequence[int], slots: Sequence[int], first: int) -> None:
        """Copy prompts into slots and draw their first tokens."""
        rows = range(first, first + len(slots))
        of = self._on([share.prompts.index(owner) for owner in owners])
        at = self._on(list(slots))
        self.cache.place(share.cache, of, at)
        start = Rows.empty(len(slots), self.device)
        start.column.copy_(self._on([len(self.prompts[owner]) for owner in owners]))
        start.row.copy_(self._on(list(rows)))
        start.ended.fill_(False)
        self._draw(start, share.logits.index_select(0, of))
        self.state.put(at, start)
        for slot, row in zip(slots, rows, strict=True):
            self.seats[slot] = Seat(row, self.now + self.steps - 1)

    def _on(self, numbers: Tensor | Sequence[int]) -> Tensor:
        """Return numbers on the device, without waiting for it."""
        tensor = torch.as_tensor(numbers)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self._replays else tensor.to(self.device)

    # ---------------------------------------------------------------------------------------------------------- steps

    def _advance(self) -> None:
        """Take one step of the first `size` slots: launched once, then recorded, then replayed."""
        if self.size in self.graphs:
            self.graphs[self.size].replay()
        elif self._replays and not self.trust.broken and self.size in self.warm:
            rows = self.state.first(self.size)
            results = (rows.token, rows.column, rows.drawn, rows.ended)
            graph = recorded(self._step, results, self.trust, self.device, self.trust.former)
            if graph is not None:
                self.graphs[self.size] = self.trust.former = graph
        else:
            self._step()
            self.warm.add(self.size)

    def _step(self) -> None:
        """Take the last token of the first `size` slots in and draw the next; nothing waits for the device."""
        rows = self.state.first(self.size)
        self.cache.at = rows.column
        states = body(self.model.network)(
            input_ids=rows.token[:, None],
            attention_mask=mask_of(rows.column, self.cache.columns),
            position_ids=rows.column[:, None],
            **cached(self.model.network, self.cache),
        ).last_hidden_state
        rows.column.add_(~rows.ended)
        self._draw(rows, self.model.head.logits(states[:, -1]))

    def _draw(self, rows: Rows, logits: Tensor) -> None:
        """Draw a token of each row that has not ended and write it down.

        Args:
            rows: which.
            logits: "s v".
        """
        at = rows.drawn.clamp(max=self.steps - 1)
        uniform = None if self.numbers is None else self.numbers[rows.row, at]
        tokens, logprobs = self.model.sampler(logits, uniform)
        to = rows.row.masked_fill(rows.ended, len(self.tokens) - 1)
        rows.drawn.add_(~rows.ended)
        stopped = (tokens[:, None] == self.model.stops).any(dim=1)
        self.tokens[to, at] = tokens
        self.logprobs[to, at] = logprobs
        if self.versions is not None:
            self.versions[to, at] = self._version
        self.length[to] = rows.drawn
        self.stopped[to] = stopped
        rows.token.copy_(tokens)
        rows.ended.logical_or_(stopped | (rows.drawn >= self.steps))

    # ----------------------------------------------------------------------------------------------------------- ends

    def _look(self) -> Look:
        """Ask the device what its slots are at, without waiting for the answer."""
        self._staging.reverse()  # the other answer may still be to be read
        found, done = self._staging[0], None
        found.copy_(torch.stack((self.state.ended.long(), self.state.drawn)), non_blocking=self._replays)
        if self._replays:
            done = torch.cuda.Event()
            done.record()
        return Look(found, [None if seat is None else seat.row for seat in self.seats], done)

    def _read(self, look: Look, counts: list[int]) -> set[int]:
        """Return the rows that had ended; note the tokens of all of them in `counts`."""
        if look.done is not None:
            look.done.synchronize()
        ended, drawn = look.found.tolist()
        for slot, row in enumerate(look.rows):
            if row is not None:
                counts[row] = drawn[slot]
        return {row for slot, row in enumerate(look.rows) if row is not None and ended[slot]}

    def _narrow(self) -> None:
        """Step fewer slots where few rows are left; they move to the first ones."""
        live = [slot for slot, seat in enumerate(self.seats) if seat is not None]
        if len(live) * NARROW > self.size:
            return
        self.size = min(size for size in sizes_of(self.slots) if size >= len(live))
        sources = [slot for slot in live if slot >= self.size]
        targets = [slot for slot in range(self.size) if self.seats[slot] is None][: len(sources)]
        if sources:
            self.cache.move(self._on(sources), self._on(targets))
            self.state.move(self._on(sources), self._on(targets))
            for source, target in zip(sources, targets, strict=True):
                self.seats[target], self.seats[source] = self.seats[source], None
