"""The online balancer: experts follow the tokens while the model runs, and nothing stops for it."""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from imbrex.balancer.channel import Channel, connect
from imbrex.balancer.counts import Book
from imbrex.balancer.journal import Journal
from imbrex.balancer.migration import Change, Mover, Peers
from imbrex.balancer.payload import most_staged, optimizer_tensors, row_bytes, signature
from imbrex.balancer.peer_memory import PeerMover, reach_each_other
from imbrex.balancer.protocol import Verdict, Vote, judge
from imbrex.balancer.renewal import DueLayer, agree_on_plan, plan
from imbrex.balancer.round import Ballots, Round, migrate
from imbrex.balancer.seat import Layer, Seat
from imbrex.balancer.tally import Tally, exposition
from imbrex.contracts import Placement
from imbrex.placement.online import Pace, layers_due, renew
from imbrex.placement.packing import Floats
from imbrex.placement.split import SPLITS
from imbrex.runtime import waits


class OnlineBalancer:
    """Renews the placements of the layers attached to it, a few layers an iteration.

    pace: how often and how much; also sets the layers' replica split. optimizer: whose state follows the
        experts; without it, training layers are refused.
    patience: steps after which a migration still under way is not used. most_failures: migrations in a row
        that may fail until the balancer stops, with a warning. max_bytes_per_iter: bytes of weights that all
        ranks together may fetch in an iteration. timeout: seconds, as in `Exchange`.
    mover: makes what moves the weights, see `imbrex.balancer.Mover`; `None`: copies from GPU to GPU where the
        ranks share a host and reach each other's memory, else messages through the host.
    journal: file to which every step adds a line, for `imbrex balance report` and `record`; give it on one
        rank.

    Call `step()` on every rank after every iteration: after the forward, or after `optimizer.step()`. In
    inference weights move in the background, and placements change inside a later `step`; with an optimizer,
    which changes the weights, they move inside `step`, but not while gradients wait for it. Outputs do not
    change. Call `settle()` before weights are replaced by other means, and before a CUDA graph is captured.
    The layers of one balancer share one group of ranks, and one data group.
    """

    def __init__(
        self,
        pace: Pace | None = None,
        *,
        optimizer: Optimizer | None = None,
        patience: int = 256,
        most_failures: int = 3,
        max_bytes_per_iter: int | None = None,
        timeout: float | None = None,
        mover: Callable[[Peers, torch.device], Mover] | None = None,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        self.pace, self.optimizer = pace or Pace(), optimizer
        self.patience, self.most_failures, self.max_bytes_per_iter = (
            patience,
            most_failures,
            max_bytes_per_iter,
        )
        self.timeout_s = waits.timeout_seconds(timeout)
        self.tally = Tally()
        self.seats: list[Seat] = []
        self.stopped_because = ""
        self._make_mover = mover
        self._journal = None if journal is None else Journal(journal)
        self.mover: Mover | None = None
        self._book: Book | None = None
        self._others: Channel | None = None
        self._groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = None, None
        self._round: Round | None = None
        self._rounds = self._turns = self._failures = 0
        self._closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="imbrex-balancer")

    def attach(self, layer: Layer) -> None:
        """Balance a layer from now on. Collective over its group.

        Raises ValueError where its experts cannot move, or other layers here have another group.
        """
        ranks = layer.ranks
        if self._closed:
            raise ValueError("balancer: it is closed; make a new one")
        if ranks.size == 1:
            raise ValueError("balancer: the layer lives on one rank; there is nothing to balance")
        if self.mover is None:
            self._join(layer)
        elif self._groups != (ranks.group, ranks.data_group):
            raise ValueError(
                "balancer: layers of one balancer share one group; use a balancer for each group"
            )
        seat = Seat(layer, self.pace, SPLITS[self.pace.split], self._book)
        weights = seat.weights()
        nbytes = row_bytes(list(weights.values()))
        self._agree("the layer's weights", signature(weights))
        self._most_moves(nbytes)
        self.seats.append(seat)

    def step(self) -> list[int]:
        """Balance between two iterations, on every rank; the numbers of the layers that have a new placement.

        Raises RankLostError where a rank does not answer; ValueError where a layer in training cannot be
        balanced.
        """
        if not self.seats:
            return []
        begin = time.perf_counter()
        training = self._training()
        page = None if self._book is None else self._book.turn()
        for seat in self.seats:
            seat.end_iteration(page)
        waits = training and any(seat.awaits_optimizer() for seat in self.seats)
        switched = self._conclude(void=training) if self._round and self._round.cast else []
        while training and self._round:
            self._vote(wait=True)
            switched += self._conclude(void=True)
        if self._round is not None:
            self._vote(wait=False)
        elif not self.stopped_because:
            # Votes begin a step later: nobody has anything to say yet, and telling it costs the host.
            self._open(training, waits)
        if training and self._round:
            self._vote(wait=True)
            switched += self._conclude()
        self.tally.add(iterations=1, seconds_exposed=time.perf_counter() - begin)
        if self._journal is not None:
            self._journal.add(self.seats, self.tally, switched)
        return switched

    def settle(self) -> None:
        """End the migration under way without using it. Collective. Call before weights are replaced."""
        while self._round:
            if not self._round.cast:
                self._vote(wait=True)
            self._conclude(void=True)
        if self._journal is not None:
            self._journal.write(wait=True)

    def close(self) -> None:
        """Stop balancing; placements stay as they are. Not collective: what is under way is abandoned."""
        self._closed = True
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self._journal is not None:
            self._journal.write(wait=True)
        for seat in self.seats:
            seat.leave()
        if self.mover is not None:
            self.mover.close()
        self.seats = []

    def renew(
        self, recent_HE: Floats, placement: Placement, pace: Pace, *, whole_HE: Floats
    ) -> Placement | None:
        """The next placement of a layer, or `None` to leave it. Override it for a policy of your own.

        recent_HE: choices of every expert in parts of the last iterations, the oldest first, weighted by age.
        whole_HE: the same by whole iterations. pace: how much may change; `pace.max_moves` experts at most.
        Runs on another thread, on every rank, and must give the same everywhere: let it depend on nothing but
        its arguments. If it raises, placements stay as they are.
        """
        return renew(recent_HE, placement, pace, whole_HE=whole_HE)

    def metrics(self) -> str:
        """Counters and the balancedness of every layer, in Prometheus' text format."""
        loads = {seat.number: seat.loads_W.tolist() for seat in self.seats}
        promised = {seat.number: seat.predicted for seat in self.seats if seat.predicted}
        return exposition(self.tally, loads, promised)

    def _join(self, layer: Layer) -> None:
        ranks = layer.ranks
        device = layer.exchange.transport.device  # a model may be built on the CPU and moved there
        lines = connect(ranks, layer.exchange.transport.exchange_counts, self.timeout_s)
        self._groups, self._ballots = (ranks.group, ranks.data_group), Ballots(lines.votes)
        self._others, self._group = lines.counts, lines.weights
        self._book = Book(device, self.timeout_s) if device.type == "cuda" else None
        peers = Peers(
            channel=lines.weights,
            expert_rank=ranks.expert_rank,
            tensor_rank=ranks.tensor_rank,
            tensor_size=ranks.tensor_size,
        )
        if self._make_mover is not None:
            self.mover = self._make_mover(peers, device)
        elif reach_each_other(lines.votes, device):
            self.mover = PeerMover(peers, device, ranks.group)
        else:
            self.mover = Mover(peers, device)
        self._agree("the pace", zlib.crc32(repr((self.pace, self.patience, self.most_failures)).encode()))

    def _agree(self, what: str, number: int, word: int = 0) -> list[int]:
        """Raise ValueError where ranks have different numbers. Returns every rank's word."""
        self._ballots.cast(number, word)
        votes, words = zip(*self._ballots.read(), strict=True)
        different = [rank for rank, other in enumerate(votes) if other != votes[0]]
        if different:
            raise ValueError(
                f"balancer: ranks disagree about {what}: rank {different[0]} has something else than rank 0; "
                "give every rank the same"
            )
        return list(words)

    def _training(self) -> bool:
        """Whether weights may change between steps, and an optimizer's state with them: with an optimizer
        also in an evaluation. Raises ValueError where the optimizer cannot follow."""
        training = any(seat.layer.training and seat.parameters for seat in self.seats)
        if training and self.optimizer is None and not self.stopped_because:
            raise ValueError(
                "balancer: a layer is in training and its optimizer's state must follow the experts; pass "
                "OnlineBalancer(optimizer=...), or call model.eval()"
            )
        return training or (self.optimizer is not None and any(seat.parameters for seat in self.seats))

    def _most_moves(self, nbytes: int) -> int:
        """Experts that may be fetched in one update of a layer. Raises ValueError where it is none."""
        if self.max_bytes_per_iter is None or not self.pace.layer_updates_per_iter:
            return self.pace.max_moves
        share = self.max_bytes_per_iter // self.pace.layer_updates_per_iter
        if share < nbytes:
            raise ValueError(
                f"balancer: an expert is {nbytes} bytes, with its optimizer's state where it has one, but "
                f"max_bytes_per_iter={self.max_bytes_per_iter} for {self.pace.layer_updates_per_iter} layers "
                "an iteration; allow at least one expert a layer"
            )
        return min(self.pace.max_moves, share // max(nbytes, 1))

    def _open(self, training: bool, waits: bool) -> None:
        """Begin to plan and move what is due; what the plan is made from is fixed here, on every rank. waits:
        whether gradients wait for the optimizer on this rank; then nothing moves on any."""
        assert self.mover is not None
        # By turns, not iterations: migrations of two steps each would meet every other layer only.
        due = layers_due(self._turns, len(self.seats), self.pace.layer_updates_per_iter)
        self._turns += 1
        # What other data groups have heard is not known here: their ranks open, too.
        due = [at for at in due if self.seats[at].recent or self._others is not None]
        if not due:
            return
        payloads = {at: self.seats[at].weights() for at in due}
        if training:
            assert self.optimizer is not None
            for at in due:
                payloads[at] |= optimizer_tensors(self.seats[at].layer.experts, self.optimizer)
            state = zlib.crc32(repr([signature(p) for p in payloads.values()]).encode())
            if any(self._agree("the optimizer's state", state, waits)):
                self._turns -= 1
                return
        paces = {at: self._pace_of(tensors) for at, tensors in payloads.items()}
        self.mover.prepare(sum(most_staged(payloads[at], paces[at].max_moves) for at in due))
        wishes = [
            DueLayer(
                layer=at,
                recent=tuple(self.seats[at].recent),
                placement=self.seats[at].layer.placement,
                tensors=payloads[at],
                pace=paces[at],
            )
            for at in due
        ]
        number, mover = self._rounds, self.mover
        self._rounds += 1
        self.tally.add(rounds=1)
        planned = partial(self._plan, wishes)
        self._round = Round(
            number, self._worker.submit(migrate, planned, lambda changes: mover.move(number, changes))
        )

    def _plan(self, wishes: list[DueLayer]) -> list[Change]:
        make = partial(plan, wishes, self._others, self.renew)
        # Ours depends on its arguments alone.
        return make() if type(self).renew is OnlineBalancer.renew else agree_on_plan(make, self._group)

    def _pace_of(self, tensors) -> Pace:
        return replace(self.pace, max_moves=self._most_moves(row_bytes(list(tensors.values()))))

    def _vote(self, *, wait: bool) -> None:
        """Tell all ranks where this one stands. wait: stand at the end first."""
        assert self._round is not None
        if wait:
            self._round.future.exception()
        self._ballots.cast(int(self._round.vote), self._round.number, self._round.checksum)
        self._round.cast = True

    def _conclude(self, *, void: bool = False) -> list[int]:
        """Read the votes cast last and do what they say. void: the migration may not be used."""
        assert self._round is not None
        ballots, self._round.cast = self._ballots.read(), False
        votes = [Vote(vote) for vote, _, _ in ballots]
        standing = self._round.standing
        if void or len({number for _, number, _ in ballots}) > 1:
            standing = replace(standing, void=True)
        if Vote.MOVING not in votes and len({checksum for _, _, checksum in ballots}) > 1:
            standing = replace(standing, void=True)
        verdict, standing = judge(votes, standing, self.patience)
        self._round.standing = standing
        if verdict == Verdict.WAIT:
            if standing.age == self.patience:
                self._report_late(votes)
            return []
        self.tally.set(late=0)
        ended, self._round = self._round, None
        if verdict == Verdict.DROP:
            self._drop(ended, votes, intended=void)
            return []
        self._failures = 0
        return self._switch(ended)

    def _report_late(self, votes: list[Vote]) -> None:
        moving = [rank for rank, vote in enumerate(votes) if vote == Vote.MOVING]
        self.tally.set(late=1)
        warnings.warn(
            f"imbrex's online balancer: ranks {moving} have been moving weights for {self.patience} steps; "
            "what they bring will not be used, and nothing else moves until they end",
            RuntimeWarning,
            stacklevel=4,
        )

    @torch.no_grad()
    def _switch(self, ended: Round) -> list[int]:
        migrated = ended.future.result()
        for change in migrated.changes:
            seat = self.seats[change.layer]
            written = seat.switch(change, migrated.arrived, training=self.optimizer is not None)
            fetched = sum(f.target == seat.layer.ranks.expert_rank for f in change.fetches)
            self.tally.add(switches=1, fetched_experts=fetched, bytes_moved=written)
        self.tally.add(seconds_hidden=migrated.seconds)
        return [self.seats[change.layer].number for change in migrated.changes]

    def _drop(self, ended: Round, votes: list[Vote], *, intended: bool) -> None:
        """The placements stay. Too many failures in a row, the same on every rank, end the balancing."""
        self.tally.add(drops=1)
        if intended:
            return
        self._failures += 1
        if self._failures < self.most_failures:
            return
        error = ended.future.exception()
        failed = [rank for rank, vote in enumerate(votes) if vote == Vote.FAILED]
        self.stopped_because = (
            f"the last {self._failures} migrations failed or were late (ranks that failed: {failed}; "
            f"here: {error!r})"
        )
        self.tally.add(stopped=1)
        warnings.warn(
            f"imbrex's online balancer has stopped: {self.stopped_because}; placements stay as they are",
            RuntimeWarning,
            stacklevel=3,
        )
