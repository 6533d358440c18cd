"""The FFN server's loop: any number of attention processes, one thread, one computation at a time.

Every peer has its own row counts and its own pace; a peer that stalls, floods or speaks nonsense is dropped without
holding up the others. While the weights are loading, the loop runs in a helper thread and only shakes hands, so that
a wrong partner is told before it loads anything itself; ``calls`` then run in the main thread, to which vLLM's worker
has bound the cores.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import select
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from afd_patch.connectors import wire
from afd_patch.connectors.client import WIRE_DTYPES
from afd_patch.connectors.log_limit import LogLimit
from afd_patch.connectors.wire import FLAG_SHARED_MEMORY, Header, Kind
from afd_patch.errors import AFDError, ConnectorError, HandshakeError, ProtocolError, RankLost
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.peer import NoDescriptor, Peer, PeerLeft, error_frame
from afd_patch.identity import Identity

logger = logging.getLogger("vllm.afd_patch")

#: ``compute(layer, request) -> reply``: ``[rows, request_columns]`` to ``[rows, reply_columns]``; called from the
#: thread that runs ``serve``.
Compute = Callable[[int, torch.Tensor], torch.Tensor]

#: Seconds since a peer's last call until a draining server takes it for idle. Between two calls of a forward the peer
#: computes the attention of one layer, and between two forwards it samples and schedules.
DRAIN_IDLE = 5.0
#: Seconds between two looks at the clocks of the peers, and the same while draining.
_TICK, _DRAIN_TICK = 0.5, 0.1
#: Within so many seconds, so many peers that are dropped for the same reason have a log line each, and the same failure
#: of a call has one; then follows the number of the others.
_LOG_SECONDS, _DROP_LINES = 5.0, 10
#: How an HTTP request of any method begins, and the preface of HTTP/2.
_HTTP_START = re.compile(rb"[A-Z-]+ ")
_HTTP_TEXT = (
    f"This port carries AFD activations (protocol {wire.PROTOCOL_VERSION}) between vLLM processes. "
    "The OpenAI API is served by the attention role, on its own port.\n"
)
_HTTP_ANSWER = (
    f"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(_HTTP_TEXT)}\r\n\r\n{_HTTP_TEXT}"
).encode()


class FFNServer:
    """Serves ``identity`` at the endpoint of ``listener``. ``spin`` is seconds of active waiting after every event."""

    def __init__(self, listener: Listener, identity: Identity, spin: float = 0.0) -> None:
        self.identity = identity
        self.calls = 0
        self._listener = listener
        self._spin = spin
        self._dtype: torch.dtype = getattr(torch, identity.dtype)
        self._code = WIRE_DTYPES[self._dtype]
        self._compute: Compute | None = None
        self._sessions = itertools.count(1)
        self._peers: dict[int, Peer] = {}
        self._stop = False
        self._closed = False
        self._accept_again = 0.0
        self._log_limit = LogLimit(_LOG_SECONDS)
        self._drain_until: float | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._listener.socket, select.EPOLLIN)
        self._epoll.register(self._wake_read, select.EPOLLIN)

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def shake_hands(self) -> None:
        """Answer handshakes until ``stop_loop``; calls wait."""
        self._loop()

    def serve(self, compute: Compute) -> None:
        """Answer calls with ``compute`` until ``drain`` or ``stop_loop``."""
        self._compute = compute
        for peer in list(self._peers.values()):
            if peer.welcome:
                self._guarded(peer, self._send_ready)
        with torch.inference_mode():  # the copies in and out cost a third of what they cost outside
            self._loop()

    def stop_loop(self) -> None:
        """Make the running loop return, or the next one at once if none runs; safe from other threads."""
        self._stop = True
        self._wake()

    def drain(self, timeout: float) -> None:
        """Take no new peers, serve the present ones until they are idle or ``timeout`` seconds passed, then return.

        A peer is idle ``DRAIN_IDLE`` seconds after its last call. Safe from signal handlers.
        """
        self._drain_until = time.monotonic() + timeout
        self._wake()

    def _wake(self) -> None:
        if not self._closed:
            with suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(self._wake_write, b"x")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers.values()):
            self._drop(peer, None)
        self._listener.close()
        self._epoll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # -- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        spin_until = 0.0
        next_check = time.monotonic()
        listening = self._listener.socket.fileno()
        while not self._stop:
            tick = _TICK if self._drain_until is None else _DRAIN_TICK
            spinning = spin_until and time.monotonic() < spin_until
            events = self._epoll.poll(0 if spinning else tick)
            for fd, event in events:
                if (peer := self._peers.get(fd)) is not None:
                    self._on_event(peer, event)
                elif fd == listening:
                    self._accept()
                elif fd == self._wake_read:
                    os.read(self._wake_read, 64)
            now = time.monotonic()
            if events and self._spin:  # the rest of a frame, or the next call, is probably on its way
                spin_until = now + self._spin
            if now >= next_check:
                next_check = now + tick
                self._check_clocks(now)
            if self._drain_until is not None and (now >= self._drain_until or not (events or self._busy(now))):
                break
        self._stop = False

    def _busy(self, now: float) -> bool:
        """Whether a peer is in the middle of a frame or, as far as one can see, of a forward."""
        return any(
            peer.blocked or peer.mid_frame or now - peer.last_call < DRAIN_IDLE
            for peer in self._peers.values()
            if peer.welcome
        )

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # No file descriptor or memory is left. The connection keeps waiting, and would keep the loop awake.
            if self._log_limit.due(error):
                logger.warning("AFD ffn: cannot take another connection at %s: %s", self._listener.endpoint, error)
            self._epoll.modify(self._listener.socket, 0)
            self._accept_again = time.monotonic() + _TICK
            return
        try:
            if self._drain_until is not None:
                raise ConnectionError("draining")
            peer = Peer(sock, next(self._sessions), address)
            self._epoll.register(sock, select.EPOLLIN)
        except OSError:
            sock.close()
            return
        self._peers[sock.fileno()] = peer

    def _check_clocks(self, now: float) -> None:
        for count, cause in self._log_limit.omitted():
            logger.info(
                "AFD ffn: %s: %d more within %g s, the last: %s", self._listener.endpoint, count, _LOG_SECONDS, cause
            )
        if self._accept_again and now >= self._accept_again:
            self._accept_again = 0.0
            self._epoll.modify(self._listener.socket, select.EPOLLIN)
        for peer in [p for p in self._peers.values() if p.deadline is not None and p.deadline < now]:
            what = "it did not take its reply" if peer.blocked else "it stopped in the middle of a frame"
            self._drop(peer, what if peer.welcome else "it did not finish its handshake")

    def _on_event(self, peer: Peer, event: int) -> None:
        if peer.blocked:  # only one frame of a peer is in work at a time
            self._guarded(peer, Peer.flush)
        elif event & ~select.EPOLLOUT:
            self._guarded(peer, self._on_readable)

    def _guarded(self, peer: Peer, action: Callable[[Peer], None]) -> None:
        """Run ``action``; whatever is the peer's fault costs the peer its connection and nothing else."""
        was_blocked = peer.blocked
        try:
            action(peer)
            if peer.blocked != was_blocked and not peer.closed:
                self._epoll.modify(peer.socket, select.EPOLLOUT if peer.blocked else select.EPOLLIN)
        except PeerLeft:
            self._left(peer)
        except ProtocolError as error:
            self._refuse(peer, error)
        except NoDescriptor as error:
            self._drop(peer, str(error))
        except OSError as error:
            # Whoever only wanted to know that we are here does not wait for READY.
            if peer.welcome and not peer.calls and not peer.mid_frame and isinstance(error, ConnectionError):
                self._left(peer)
            else:
                self._drop(peer, f"connection lost ({error})")
        except Exception as error:  # a defect here must not end the connections of the others
            if self._log_limit.due(f"defect: {error!r}"):
                logger.exception("AFD ffn: a defect of the server in the connection of %s", peer.name)
            self._drop(peer, f"{type(error).__name__}, a defect of the server")

    def _refuse(self, peer: Peer, error: ProtocolError) -> None:
        """Drop ``peer``, and tell it why if it may not know yet what it speaks to."""
        reason = str(error)
        if not peer.welcome and not isinstance(error, wire.DamagedError):
            if _HTTP_START.match(peer.first_bytes):
                reason = "an HTTP client called the data port"
                peer.send_last(_HTTP_ANSWER)
            elif peer.first_bytes.startswith(wire.MAGIC):
                peer.send_last(wire.text_frame(Kind.REFUSE, {"reason": reason}))
        self._drop(peer, reason)

    def _left(self, peer: Peer) -> None:
        # Every start of an attention role has a connection without a call: its first look at the server.
        level = logging.INFO if peer.calls else logging.DEBUG
        logger.log(level, "AFD ffn: peer %d left after %d calls", peer.session, peer.calls)
        self._drop(peer, None)

    def _drop(self, peer: Peer, reason: str | None) -> None:
        del self._peers[peer.socket.fileno()]
        if reason is not None and self._log_limit.due(f"dropped: {reason}", _DROP_LINES):
            logger.info("AFD ffn: %s at %s dropped: %s", peer.name, self._listener.endpoint, reason)
        self._epoll.unregister(peer.socket)
        peer.close()

    # -- frames ---------------------------------------------------------------------------------------------------

    def _on_readable(self, peer: Peer) -> None:
        header = peer.read_header()
        if header is None:
            return
        if not peer.welcome:
            self._on_hello(peer, header)
        elif self._compute is None:
            raise ProtocolError(f"{header.kind.name} before READY")
        else:
            self._on_call(peer, header, self._compute)

    def _on_hello(self, peer: Peer, header: Header) -> None:
        if header.kind is not Kind.HELLO:
            raise ProtocolError(f"{header.kind.name} before the handshake")
        body = peer.text_body(header)
        if not peer.read_body(body):
            return
        content = wire.parse_text(header, body)
        peer.end_frame()
        try:
            theirs = Identity.from_json(content.get("identity"))
            reason = self.identity.mismatch(theirs) or self.identity.too_many_rows(theirs)
        except HandshakeError as error:
            reason = str(error)
        if reason is not None:
            raise ProtocolError(reason)
        peer.accept(theirs, content.get("shared_memory"))
        welcome = {"ready": self._compute is not None, "identity": self.identity.to_json()}
        peer.send(wire.text_frame(Kind.WELCOME, welcome, session=peer.session))

    @staticmethod
    def _send_ready(peer: Peer) -> None:
        peer.send(Header(Kind.READY, peer.session).pack())

    def _on_call(self, peer: Peer, header: Header, compute: Compute) -> None:
        self._check_call(peer, header)
        rows = peer.requests[: header.rows]
        if not peer.shared:
            payload = _bytes_of(rows)
            if not peer.read_body(payload):
                return
            wire.verify_payload(header, payload)
        peer.end_frame()
        self.calls += 1
        peer.calls += 1
        self._answer(peer, header, rows, compute)
        peer.last_call = time.monotonic()

    def _answer(self, peer: Peer, header: Header, rows: torch.Tensor, compute: Compute) -> None:
        try:
            result = compute(header.layer, rows)
            if result.shape != (header.rows, self.identity.reply_columns) or result.dtype != self._dtype:
                raise ConnectorError(f"the FFN returned {result.dtype} {tuple(result.shape)}")
            if not peer.shared:
                result = result.detach().contiguous().cpu()
        except RankLost:
            self.stop_loop()  # no answer: the peer sees this server end, and repeats the call elsewhere
            return
        except Exception as error:  # whatever the native FFN raises is the caller's answer, not the server's end
            self._log_failure(peer, header, error)
            peer.send(error_frame(header, f"{type(error).__name__}: {error}"))
            return
        if peer.shared:
            peer.replies[: header.rows].copy_(result)
            payload = memoryview(b"")
        else:
            payload = _bytes_of(result)
        reply = Header(
            Kind.REPLY, header.session, header.transaction, header.call, header.layer, header.stage, self._code,
            header.rows, self.identity.reply_columns, header.flags, len(payload),
            wire.payload_check(payload) if payload else 0,
        )  # fmt: skip
        peer.send(reply.pack(), payload)

    def _log_failure(self, peer: Peer, header: Header, error: Exception) -> None:
        """An error of ours says what was wrong with the call; any other one has its stack trace."""
        if not self._log_limit.due(f"failed: {error!r}"):
            return
        if isinstance(error, AFDError):
            logger.warning("AFD ffn: layer %d failed on %d rows of %s: %s", header.layer, header.rows, peer.name, error)
        else:
            logger.exception("AFD ffn: layer %d failed on %d rows of %s", header.layer, header.rows, peer.name)

    def _check_call(self, peer: Peer, header: Header) -> None:
        identity = self.identity
        payload = 0 if peer.shared else header.rows * header.width * self._dtype.itemsize
        flags = FLAG_SHARED_MEMORY if peer.shared else 0
        if header.kind is not Kind.CALL:
            raise ProtocolError(f"{header.kind.name} where a call was expected")
        if header.session != peer.session:
            raise ProtocolError(f"a call with session {header.session}, this connection is {peer.session}")
        if header.layer >= identity.layers:
            raise ProtocolError(f"a call with layer {header.layer} of {identity.layers}")
        if header.dtype is not self._code:
            raise ProtocolError(f"a call with dtype {header.dtype.name}, the model has {identity.dtype}")
        if header.width != identity.request_columns:
            raise ProtocolError(f"a call with rows of {header.width}, {identity.request_columns} were agreed")
        if not 0 < header.rows <= peer.max_rows:
            raise ProtocolError(f"a call with {header.rows} rows, between 1 and {peer.max_rows} were agreed")
        if header.flags != flags:
            raise ProtocolError(f"a call with flags {header.flags}, {flags} expected")
        if header.payload != payload:
            raise ProtocolError(f"a call with a payload of {header.payload} bytes, {payload} expected")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of this host, as bytes."""
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")
