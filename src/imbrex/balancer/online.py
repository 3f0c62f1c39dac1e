"""The online balancer: experts follow the tokens while the model runs, and nothing stops for it."""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from imbrex import waiting
from imbrex.balancer.channel import Channel, common_number
from imbrex.balancer.journal import append
from imbrex.balancer.migration import Change, Mover, Peers, settle_device
from imbrex.balancer.payload import optimizer_tensors, row_bytes, signature
from imbrex.balancer.protocol import Verdict, Vote, judge
from imbrex.balancer.round import Ballots, Round, migrate
from imbrex.balancer.seat import Layer, Seat
from imbrex.balancer.tally import Tally, exposition
from imbrex.placement.online import Pace, layers_due, renew
from imbrex.placement.split import SPLITS


class OnlineBalancer:
    """Renews the placements of the layers attached to it, a few layers an iteration.

    pace: how often and how much; also sets the layers' replica split. optimizer: whose state follows the
        experts in training; without it, training layers are refused.
    patience: steps after which a migration still under way is not used. most_failures: migrations in a row
        that may fail until the balancer stops, with a warning. max_bytes_per_iter: bytes of weights that all
        ranks together may fetch in an iteration. timeout: seconds, as in `Exchange`.
    mover: moves the weights; see `imbrex.balancer.Mover`. journal: file to which every step adds a line, for
        `imbrex balance report` and `record`; give it on one rank.

    Call `step()` on every rank after every iteration: after the forward, or after `optimizer.step()`. In
    inference weights move in the background, and placements change inside a later `step`; in training, where
    every step changes the weights, they move inside `step`. Outputs do not change. Call `settle()` before
    weights are replaced by other means. The layers of one balancer share one group of ranks.
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
        mover: Callable[[Peers], Mover] = Mover,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        self.pace, self.optimizer = pace or Pace(), optimizer
        self.patience, self.most_failures, self.max_bytes_per_iter = (
            patience,
            most_failures,
            max_bytes_per_iter,
        )
        self.timeout_s = waiting.timeout_seconds(timeout)
        self.tally = Tally()
        self.seats: list[Seat] = []
        self.stopped_because = ""
        self._make_mover, self._journal = mover, journal
        self._group: dist.ProcessGroup | None = None
        self._round: Round | None = None
        self._rounds = self._failures = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="imbrex-balancer")

    def attach(self, layer: Layer) -> None:
        """Balance a layer from now on. Collective over its group.

        Raises ValueError where its experts cannot move, or other layers here have another group.
        """
        ranks = layer.ranks
        if ranks.size == 1:
            raise ValueError("balancer: the layer lives on one rank; there is nothing to balance")
        if ranks.data_size > 1:
            raise ValueError(
                "balancer: the layer has a data_group, whose other groups must hold the same experts but "
                "would be balanced on their own; leave the balancer or the data_group out"
            )
        if self._group is None:
            self._join(layer)
        elif self._group is not ranks.group:
            raise ValueError(
                "balancer: layers of one balancer share one group; use a balancer for each group"
            )
        seat = Seat(layer, self.pace, SPLITS[self.pace.split])
        weights = seat.weights()
        nbytes = row_bytes(list(weights.values()))
        self._agree("the layer's weights", signature(weights))
        if self.max_bytes_per_iter is not None and self._most_moves(nbytes) < 1:
            raise ValueError(
                f"balancer: an expert is {nbytes} bytes but max_bytes_per_iter={self.max_bytes_per_iter} for "
                f"{self.pace.layer_updates_per_iter} layers an iteration; allow at least one expert a layer"
            )
        self.seats.append(seat)

    def step(self) -> list[int]:
        """Between two iterations, on every rank: numbers of the layers that have a new placement.

        Raises RankLostError where a rank does not answer; ValueError where a layer in training cannot be
        balanced.
        """
        if not self.seats:
            return []
        begin = time.perf_counter()
        training = self._training()
        for seat in self.seats:
            seat.end_iteration()
        switched = self._conclude(void=training) if self._round else []
        while training and self._round:
            self._vote(wait=True)
            switched += self._conclude(void=True)
        if self._round is None and not self.stopped_because:
            self._open(training)
        if self._round:
            self._vote(wait=training)
            if training:
                switched += self._conclude()
        self.tally.add(iterations=1, seconds_exposed=time.perf_counter() - begin)
        if self._journal is not None:
            append(self._journal, self.seats, self.tally, switched)
        return switched

    def settle(self) -> None:
        """End the migration under way without using it. Collective. Call before weights are replaced."""
        while self._round:
            self._conclude(void=True)
            if self._round:
                self._vote(wait=True)

    def close(self) -> None:
        """Stop balancing; placements stay as they are. Not collective: what is under way is abandoned."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        for seat in self.seats:
            seat.layer.exchange.relocate(split=seat.split)
        self.seats = []

    def metrics(self) -> str:
        """Counters and the balancedness of every layer, in Prometheus' text format."""
        # on the host: loads are kept there
        loads = {seat.number: seat.last_loads_W.tolist() for seat in self.seats}
        promised = {seat.number: seat.predicted for seat in self.seats if seat.predicted}
        return exposition(self.tally, loads, promised)

    def _join(self, layer: Layer) -> None:
        ranks = layer.ranks
        number = common_number(layer.exchange.transport.exchange_counts)
        votes, weights = (
            Channel(f"{number}/{use}", ranks.rank, ranks.size, self.timeout_s) for use in ("votes", "weights")
        )
        self._group, self._ballots = ranks.group, Ballots(votes)
        peers = Peers(
            channel=weights,
            expert_rank=ranks.expert_rank,
            tensor_rank=ranks.tensor_rank,
            tensor_size=ranks.tensor_size,
        )
        self._mover = self._make_mover(peers)
        self._agree("the pace", zlib.crc32(repr((self.pace, self.patience, self.most_failures)).encode()))

    def _agree(self, what: str, number: int) -> None:
        self._ballots.cast(number)
        said = [row[0] for row in self._ballots.read()]
        different = [rank for rank, other in enumerate(said) if other != said[0]]
        if different:
            raise ValueError(
                f"balancer: ranks disagree about {what}: rank {different[0]} has something else than rank 0; "
                "give every rank the same"
            )

    def _training(self) -> bool:
        """Whether weights change between steps. Raises ValueError where the optimizer cannot follow."""
        training = any(seat.layer.training and seat.parameters for seat in self.seats)
        if training and self.optimizer is None and not self.stopped_because:
            raise ValueError(
                "balancer: a layer is in training and its optimizer's state must follow the experts; pass "
                "OnlineBalancer(optimizer=...), or call model.eval()"
            )
        return training

    def _most_moves(self, nbytes: int) -> int:
        """Experts that may be fetched in one update of a layer."""
        if self.max_bytes_per_iter is None or not self.pace.layer_updates_per_iter:
            return self.pace.max_moves
        share = self.max_bytes_per_iter // self.pace.layer_updates_per_iter
        return min(self.pace.max_moves, share // max(nbytes, 1))

    def _open(self, training: bool) -> None:
        """Begin to plan and move what is due; what the plan is made from is fixed here, on every rank."""
        due = layers_due(
            int(self.tally.values["iterations"]), len(self.seats), self.pace.layer_updates_per_iter
        )
        due = [at for at in due if len(self.seats[at].window)]
        if not due:
            return
        payloads = {at: self.seats[at].weights() for at in due}
        if training:
            assert self.optimizer is not None
            for at in due:
                payloads[at] |= optimizer_tensors(self.seats[at].layer.experts, self.optimizer)
                settle_device(payloads[at].values())
            self._agree(
                "the optimizer's state", zlib.crc32(repr([signature(p) for p in payloads.values()]).encode())
            )
        asked = [
            (
                at,
                self.seats[at].window.recent_HE(),
                self.seats[at].layer.placement,
                self._pace_of(payloads[at]),
            )
            for at in due
        ]
        number = self._rounds
        self._rounds += 1
        self.tally.add(rounds=1)

        def plan() -> list[Change]:
            found = ((at, old, renew(recent, old, pace)) for at, recent, old, pace in asked)
            return [
                Change(layer=at, old=old, new=new, tensors=payloads[at])
                for at, old, new in found
                if new is not None
            ]

        self._round = Round(
            number, self._worker.submit(migrate, plan, lambda changes: self._mover.move(number, changes))
        )

    def _pace_of(self, tensors) -> Pace:
        return replace(self.pace, max_moves=self._most_moves(row_bytes(list(tensors.values()))))

    def _vote(self, *, wait: bool) -> None:
        """Tell all ranks where this one stands. wait: stand at the end first."""
        assert self._round is not None
        if wait:
            self._round.future.exception()
        self._ballots.cast(int(self._round.vote), self._round.number, self._round.checksum)

    def _conclude(self, *, void: bool = False) -> list[int]:
        """Read the votes cast last and do what they say. void: the migration may not be used."""
        assert self._round is not None
        said = self._ballots.read()
        votes = [Vote(vote) for vote, _, _ in said]
        standing = self._round.standing
        if void or len({number for _, number, _ in said}) > 1:
            standing = replace(standing, void=True)
        if Vote.MOVING not in votes and len({checksum for _, _, checksum in said}) > 1:
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
            self._drop(ended, votes, wanted=void)
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
            written = seat.switch(change, migrated.arrived)
            fetched = sum(f.target == seat.layer.ranks.expert_rank for f in change.fetches)
            self.tally.add(switches=1, fetched_experts=fetched, bytes_moved=written)
        self.tally.add(seconds_hidden=migrated.seconds)
        return [self.seats[change.layer].number for change in migrated.changes]

    def _drop(self, ended: Round, votes: list[Vote], *, wanted: bool) -> None:
        """The placements stay. Too many failures in a row, the same on every rank, end the balancing."""
        self.tally.add(drops=1)
        if wanted:
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
