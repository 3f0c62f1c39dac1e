"""Messages between two ranks that wait for no other rank: TCP connections beside a gloo group.

gloo cannot be used if a rank may stop waiting: a wait that times out closes the connections of all ranks, a
receive cannot be cancelled, and there is no way to ask whether a message has come. Here a thread of the
process reads and writes, and a caller waits on a condition for as long as it likes.

    mail = Mail(transport, "events")            # every rank; the ranks meet over their group
    mail.send(peer, Envelope(...), body)        # returns at once
    for peer, envelope, body in mail.take(0.1): ...

Messages between two ranks arrive in the order in which they were sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from imbrex.runtime.waits import RankLostError
from imbrex.runtime.words import words
from imbrex.transport.collective import Collective

_FRAME = struct.Struct("<9q")
_HELLO = struct.Struct("<qq")
_GET_ADDRESS = 0x8915
"""Linux' SIOCGIFADDR: the IPv4 address of an interface."""
PIECES = 64
"""Pieces in one system call, which takes 1024 at most."""
FAREWELL_S = 2.0
"""Seconds that closing waits at most for unsent messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """The head of a message.

    call: its number at the sender. kind: the kind of message. rows, row_bytes: shape of the body, uint8
    [rows, row_bytes]. details: five numbers whose meaning depends on the kind."""

    call: int
    kind: int
    rows: int = 0
    row_bytes: int = 0
    details: tuple[int, ...] = (0, 0, 0, 0, 0)


class Mail:
    """Connections to all other ranks of a transport's group, made collectively. Raises ValueError or
    RankLostError if the ranks cannot meet. `close` closes it, or the end of its last reference."""

    def __init__(self, transport: Collective, what: str) -> None:
        self.rank, self.world_size, self.what = transport.rank, transport.world_size, what
        self._inbox = _Inbox()
        sockets = _meet(transport, what)
        _Loop.of_process().join(sockets, self._inbox)
        self._sockets = sockets
        # Also before Python ends, so that the last messages arrive.
        self._end = weakref.finalize(self, _leave, list(sockets.values()))

    def send(self, peer: int, envelope: Envelope, body: Tensor | None = None) -> None:
        """Send a message without waiting. The body must not change until it has been sent."""
        e = envelope
        frame = _FRAME.pack(e.call, e.kind, e.rows, e.row_bytes, *e.details)
        pieces = [memoryview(frame)]
        if body is not None and body.numel():
            pieces.append(_bytes_of(body))
        self._sockets[peer].push(pieces)

    def unsent(self, peer: int) -> int:
        """The number of messages to `peer` that are not written yet."""
        return self._sockets[peer].unsent

    def take(self, timeout_s: float) -> list[tuple[int, Envelope, Tensor]]:
        """The messages since the last call; waits up to `timeout_s` for one."""
        return self._inbox.take(timeout_s)

    @property
    def gone(self) -> frozenset[int]:
        """Ranks whose connection is closed: they ended, or left."""
        return frozenset(self._inbox.gone)

    def close(self) -> None:
        self._end()


class _Inbox:
    """The messages that have arrived."""

    def __init__(self) -> None:
        self.messages: deque[tuple[int, Envelope, Tensor]] = deque()
        self.gone: set[int] = set()
        self.changed = threading.Condition()
        self._seen = 0

    def put(self, peer: int, envelope: Envelope, body: Tensor) -> None:
        with self.changed:
            self.messages.append((peer, envelope, body))
            self.changed.notify()

    def lose(self, peer: int) -> None:
        with self.changed:
            self.gone.add(peer)
            self.changed.notify()

    def take(self, timeout_s: float) -> list[tuple[int, Envelope, Tensor]]:
        with self.changed:
            if not self.messages and len(self.gone) == self._seen and timeout_s > 0:
                self.changed.wait(timeout_s)
            self._seen = len(self.gone)
            taken_now = list(self.messages)
            self.messages.clear()
        return taken_now


class _Connection:
    """A socket with the messages still to be written and the one that is half read."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.sock, self.peer = sock, peer
        self.inbox: _Inbox | None = None
        self.loop: _Loop | None = None
        self.lock = threading.Lock()
        self.queue: deque[memoryview] = deque()
        self.head = bytearray(_FRAME.size)
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        self.envelope: Envelope | None = None
        self.body: Tensor | None = None
        self.into, self.read_bytes = memoryview(self.head), 0

    @property
    def unsent(self) -> int:
        return len(self.queue)

    def push(self, pieces: list[memoryview]) -> None:
        """Write what the socket takes now, on the caller's thread; the loop writes the rest."""
        with self.lock:
            if self.closed:
                return
            waiting = bool(self.queue)
            self.queue.extend(pieces)
            if not waiting:
                self._write()
            left = bool(self.queue) and not waiting
        if left and self.loop is not None:
            self.loop.wake()

    def flush(self) -> None:
        with self.lock:
            self._write()

    def _write(self) -> None:
        try:
            while self.queue:
                # A head and its body in one call, so that the reader wakes up once.
                count = self.sock.sendmsg(list(islice(self.queue, PIECES)))
                while count:
                    piece = self.queue.popleft()
                    if count < len(piece):
                        self.queue.appendleft(piece[count:])
                    count -= min(count, len(piece))
        except BlockingIOError:
            return
        except OSError:
            # The reading side tells whoever waits for this rank.
            self.queue.clear()

    def read(self) -> bool:
        """Read what has arrived. Returns whether the connection is still open."""
        try:
            while True:
                count = self.sock.recv_into(self.into[self.read_bytes :])
                if count == 0:
                    return False
                self.read_bytes += count
                if self.read_bytes == len(self.into):
                    self._complete()
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _complete(self) -> None:
        if self.envelope is None:
            call, kind, rows, row_bytes, *details = _FRAME.unpack(self.head)
            self.envelope = Envelope(
                call=call, kind=kind, rows=rows, row_bytes=row_bytes, details=tuple(details)
            )
            self.body = torch.empty(rows, row_bytes, dtype=torch.uint8, device="cpu")
            if self.body.numel():
                self.into, self.read_bytes = _bytes_of(self.body), 0
                return
        assert self.inbox is not None
        assert self.body is not None
        self.inbox.put(self.peer, self.envelope, self.body)
        self._begin()


class _Loop:
    """The thread that reads and writes all connections of the process."""

    _instance: _Loop | None = None
    _guard = threading.Lock()

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.selector.register(self.reading, selectors.EVENT_READ, None)
        self.connections: list[_Connection] = []
        self.guard, self.pid = threading.Lock(), os.getpid()
        threading.Thread(target=self._run, name="imbrex-messages", daemon=True).start()

    @classmethod
    def of_process(cls) -> _Loop:
        with cls._guard:
            if cls._instance is None or cls._instance.pid != os.getpid():
                cls._instance = cls()
            return cls._instance

    def join(self, sockets: dict[int, _Connection], inbox: _Inbox) -> None:
        with self.guard:
            for connection in sockets.values():
                connection.inbox, connection.loop = inbox, self
                self.connections.append(connection)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.writing, b"w")

    def _run(self) -> None:
        changed = True
        while True:
            if changed:
                self._follow()
            changed = False
            for key, mask in self.selector.select():
                connection = key.data
                if connection is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.reading, 4096)
                    changed = True
                    continue
                if mask & selectors.EVENT_WRITE:
                    connection.flush()
                    changed = True
                if mask & selectors.EVENT_READ and not connection.read():
                    self._drop(connection)

    def _follow(self) -> None:
        """Watch connections that joined for reading, watch those with unwritten messages for writing, and
        forget those that were closed."""
        with self.guard:
            connections = list(self.connections)
        for connection in connections:
            if connection.closed:
                self._drop(connection)
                continue
            wanted_events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.queue else 0)
            known = self.selector.get_map().get(connection.sock)
            if known is None:
                self.selector.register(connection.sock, wanted_events, connection)
            elif known.events != wanted_events:
                self.selector.modify(connection.sock, wanted_events, connection)

    def _drop(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection.sock)
        with self.guard, contextlib.suppress(ValueError):
            self.connections.remove(connection)
        with connection.lock:
            connection.closed = True
            connection.queue.clear()
            connection.sock.close()
        if connection.inbox is not None:
            connection.inbox.lose(connection.peer)


def _bytes_of(body: Tensor) -> memoryview:
    """The memory of a tensor of bytes; it lives as long as the view."""
    values: Any = body.contiguous().view(-1).numpy()
    return memoryview(values)


def _leave(connections: list[_Connection]) -> None:
    """Send the rest, for at most `FAREWELL_S` seconds, and close."""
    end = time.monotonic() + FAREWELL_S
    while any(c.queue for c in connections if not c.closed) and time.monotonic() < end:
        time.sleep(1e-3)
    for connection in connections:
        connection.closed = True
    if connections and connections[0].loop is not None:
        connections[0].loop.wake()


def _meet(transport: Collective, what: str) -> dict[int, _Connection]:
    """Connect every two ranks, each rank to those before it. A secret number, told over the group, keeps
    strangers out."""
    address = _own_address()
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen(transport.world_size)
        nonce = secrets.randbits(62)
        own = int.from_bytes(socket.inet_aton(address), "big"), listener.getsockname()[1], nonce
        addresses = transport.exchange_counts(words(*own)).tolist()
        sockets: dict[int, socket.socket] = {}
        try:
            for peer in range(transport.rank):
                sockets[peer] = _call(addresses[peer], transport.rank, transport.timeout_s)
            while len(sockets) < transport.world_size - 1:
                peer, sock = _answer(listener, nonce, transport.timeout_s)
                if sock is not None:
                    sockets[peer] = sock
        except OSError as error:
            raise RankLostError(
                f"rank {transport.rank} could not reach the others for {what}: {error}; ranks want TCP "
                "between them, over the interface in GLOO_SOCKET_IFNAME"
            ) from error
    for sock in sockets.values():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return {peer: _Connection(sock, peer) for peer, sock in sockets.items()}


def _call(address: list[int], rank: int, timeout_s: float) -> socket.socket:
    number, port, nonce = address
    host = socket.inet_ntoa(number.to_bytes(4, "big"))
    sock = socket.create_connection((host, port), timeout=timeout_s)
    sock.sendall(_HELLO.pack(nonce, rank))
    return sock


def _answer(listener: socket.socket, nonce: int, timeout_s: float) -> tuple[int, socket.socket | None]:
    listener.settimeout(timeout_s)
    sock, _ = listener.accept()
    sock.settimeout(timeout_s)
    said_bytes = b""
    while len(said_bytes) < _HELLO.size:
        piece = sock.recv(_HELLO.size - len(said_bytes))
        if not piece:
            break
        said_bytes += piece
    if len(said_bytes) == _HELLO.size:
        number, peer = _HELLO.unpack(said_bytes)
        if number == nonce:
            return peer, sock
    sock.close()
    return -1, None


def _own_address() -> str:
    """The IPv4 address of this rank, found as gloo does: that of the interface in gloo's variable, else of
    the host's name, else the loopback address."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            packed = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, packed)[20:24])
        address = socket.gethostbyname(socket.gethostname())
        probe.bind((address, 0))
        return address
    return "127.0.0.1"


__all__ = ["Envelope", "Mail"]
