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
import select
import time
from collections.abc import Callable

import torch

from afd_patch.connectors import wire
from afd_patch.connectors.client import WIRE_DTYPES
from afd_patch.connectors.wire import FLAG_SHARED_MEMORY, Header, Kind
from afd_patch.errors import ConnectorError, HandshakeError, ProtocolError
from afd_patch.ffn.listener import Listener
from afd_patch.ffn.peer import Peer, error_frame
from afd_patch.identity import Identity

logger = logging.getLogger("vllm.afd_patch")

#: ``compute(layer, rows) -> rows``; called from the thread that runs ``serve``.
Compute = Callable[[int, torch.Tensor], torch.Tensor]

#: Seconds without a call after which a draining server stops.
_DRAIN_IDLE = 0.5
_HTTP_METHODS = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC")


class FFNServer:
    """Serves ``identity`` at the endpoint of ``listener``. ``spin`` is seconds of active waiting after a call."""

    def __init__(self, listener: Listener, identity: Identity, spin: float = 0.0) -> None:
        self.identity = identity
        self.calls = 0
        self._listener = listener
        self._spin = spin
        self._dtype: torch.dtype = getattr(torch, identity.dtype)
        self._reply_dtype: torch.dtype = getattr(torch, identity.reply_dtype)
        self._compute: Compute | None = None
        self._sessions = itertools.count(1)
        self._peers: dict[int, Peer] = {}
        self._stop = False
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
                self._guarded(peer, lambda peer: peer.send(Header(Kind.READY, peer.session).pack()))
        self._loop()

    def stop_loop(self) -> None:
        """Make the running loop return; safe from other threads."""
        self._stop = True
        os.write(self._wake_write, b"x")

    def drain(self, timeout: float) -> None:
        """Take no new peers, serve the present ones until they are idle or ``timeout`` seconds passed, then return.

        Safe from signal handlers.
        """
        self._drain_until = time.monotonic() + timeout
        os.write(self._wake_write, b"x")

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer, None)
        self._listener.close()
        self._epoll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # -- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        self._stop = False
        spin_until = 0.0
        last_call = time.monotonic()
        while not self._stop:
            before = self.calls
            spinning = time.perf_counter() < spin_until
            for fd, event in self._epoll.poll(0 if spinning else self._next_deadline()):
                if fd == self._wake_read:
                    os.read(self._wake_read, 64)
                elif fd == self._listener.socket.fileno():
                    self._accept()
                elif (peer := self._peers.get(fd)) is not None:
                    self._on_event(peer, event)
            if self.calls != before:
                last_call = time.monotonic()
                spin_until = time.perf_counter() + self._spin
            elif not spinning:
                self._drop_overdue()
            if self._drain_until is not None:
                now = time.monotonic()
                if now >= self._drain_until or (now - last_call > _DRAIN_IDLE and not self._busy()):
                    return

    def _next_deadline(self) -> float:
        if self._drain_until is not None:
            return 0.1
        deadlines = [peer.deadline for peer in self._peers.values() if peer.deadline is not None]
        return min(1.0, max(0.0, min(deadlines) - time.monotonic())) if deadlines else 1.0

    def _busy(self) -> bool:
        return any(peer.blocked for peer in self._peers.values())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.socket.accept()
        except BlockingIOError:
            return
        if self._drain_until is not None:
            sock.close()
            return
        session = next(self._sessions)
        peer = Peer(sock, f"peer {session}", session)
        self._peers[sock.fileno()] = peer
        self._epoll.register(sock, select.EPOLLIN)

    def _on_event(self, peer: Peer, event: int) -> None:
        if event & select.EPOLLOUT:
            self._guarded(peer, self._on_writable)
        if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not peer.blocked:
            self._guarded(peer, self._on_readable)

    def _guarded(self, peer: Peer, action: Callable[[Peer], None]) -> None:
        """Run ``action``; whatever is the peer's fault costs the peer its connection and nothing else."""
        if peer.socket.fileno() < 0:
            return
        try:
            action(peer)
            if peer.socket.fileno() >= 0:
                events = select.EPOLLOUT if peer.blocked else select.EPOLLIN
                self._epoll.modify(peer.socket, events)
        except ProtocolError as error:
            self._drop(peer, self._explain(peer, error))
        except OSError as error:
            self._drop(peer, f"connection lost ({error})" if peer.welcome else str(error))

    def _explain(self, peer: Peer, error: ProtocolError) -> str:
        if not peer.welcome and peer.first_bytes.startswith(_HTTP_METHODS):
            text = (
                f"This port carries AFD activations (protocol {wire.PROTOCOL_VERSION}) between vLLM processes. "
                "The OpenAI API is served by the attention role, on its own port.\n"
            ).encode()
            answer = b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(text)
            peer.socket.send(answer + text)
            return "an HTTP client called the data port"
        return str(error)

    def _drop(self, peer: Peer, reason: str | None) -> None:
        self._peers.pop(peer.socket.fileno(), None)
        if reason is not None:
            logger.info("AFD ffn: %s at %s dropped: %s", peer.name, self._listener.endpoint, reason)
        peer.close()

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for peer in [p for p in self._peers.values() if p.deadline is not None and p.deadline < now]:
            self._drop(peer, "it stopped in the middle of a frame")

    # -- frames ---------------------------------------------------------------------------------------------------

    def _on_writable(self, peer: Peer) -> None:
        peer.flush()

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
        content = wire.parse_text(body)
        peer.end_frame()
        try:
            theirs = Identity.from_json(content.get("identity") or {})
            reason = self.identity.mismatch(theirs) or self._too_many_rows(theirs)
        except HandshakeError as error:
            reason = str(error)
        if reason is not None:
            peer.socket.send(wire.text_frame(Kind.REFUSE, {"reason": reason}))
            self._drop(peer, f"refused: {reason}")
            return
        peer.accept(theirs, content.get("shared_memory"))
        ready = self._compute is not None
        peer.send(
            wire.text_frame(Kind.WELCOME, {"ready": ready, "identity": self.identity.to_json()}, session=peer.session)
        )

    def _too_many_rows(self, theirs: Identity) -> str | None:
        if 0 < theirs.max_rows <= self.identity.max_rows:
            return None
        return (
            f"the attention role sends up to {theirs.max_rows} rows at once and this FFN server takes "
            f"{self.identity.max_rows}; start it with --max-num-batched-tokens {theirs.max_rows}"
        )

    def _on_call(self, peer: Peer, header: Header, compute: Compute) -> None:
        self._check_call(peer, header)
        shape = (header.rows, header.width)
        if peer.shared is not None:
            rows = peer.shared.request(*shape, self._dtype)
        else:
            assert peer.rows_buffer is not None
            flat = peer.rows_buffer[: header.rows * header.width]
            if not peer.read_body(memoryview(flat.view(torch.uint8).numpy())):
                return
            rows = flat.view(shape)
        peer.end_frame()
        self.calls += 1
        try:
            result = compute(header.layer, rows)
            if result.shape != rows.shape or result.dtype != self._reply_dtype:
                raise ConnectorError(f"the FFN returned {result.dtype} {tuple(result.shape)}")
        except Exception as error:  # whatever the native FFN raises is the caller's answer, not the server's end
            logger.exception("AFD ffn: layer %d failed on %d rows", header.layer, header.rows)
            peer.send(error_frame(header, f"{type(error).__name__}: {error}"))
            return
        self._reply(peer, header, result)

    def _check_call(self, peer: Peer, header: Header) -> None:
        if header.kind is not Kind.CALL:
            raise ProtocolError(f"{header.kind.name} where a call was expected")
        expected_payload = 0 if peer.shared else header.rows * header.width * self._dtype.itemsize
        wrong = (
            (header.session != peer.session, f"session {header.session}, this connection is {peer.session}"),
            (header.layer >= self.identity.layers, f"layer {header.layer} of {self.identity.layers}"),
            (header.dtype is not WIRE_DTYPES[self._dtype], f"dtype {header.dtype.name}, the model has {self.identity.dtype}"),
            (header.width != self.identity.hidden_size, f"rows of {header.width}, the model has {self.identity.hidden_size}"),
            (not 0 < header.rows <= peer.max_rows, f"{header.rows} rows, between 1 and {peer.max_rows} were agreed"),
            (header.flags != (FLAG_SHARED_MEMORY if peer.shared else 0), f"flags {header.flags}"),
            (header.payload != expected_payload, f"a payload of {header.payload} bytes, {expected_payload} expected"),
        )
        for is_wrong, what in wrong:
            if is_wrong:
                raise ProtocolError(f"a call with {what}")

    def _reply(self, peer: Peer, header: Header, result: torch.Tensor) -> None:
        reply = Header(
            Kind.REPLY, peer.session, header.transaction, header.call, header.layer, header.stage,
            WIRE_DTYPES[self._reply_dtype], header.rows, header.width, header.flags, 0 if peer.shared else result.nbytes,
        ).pack()  # fmt: skip
        if peer.shared is not None:
            peer.shared.reply(header.rows, header.width, self._reply_dtype).copy_(result)
            peer.send(reply)
        else:
            payload = result.detach().contiguous().cpu().view(torch.uint8).numpy()
            peer.send(reply, memoryview(payload).cast("B"))
