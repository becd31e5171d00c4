"""CuttingProxy: a TCP proxy between a client and its server that counts, holds back and cuts.

    with CuttingProxy(server.address) as proxy:
        connection = psycopg2.connect(server.tcp_dsn(name, port=proxy.port))
        proxy.cut_after(received=0)     # the next statement is executed, and its answer lost
"""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

SECONDS_TO_END = 30


@dataclass(eq=False)
class Way:
    """What goes in one direction, over all connections."""

    arrived: int = 0  # bytes read by the proxy; with a closed gate some are not forwarded yet
    fuse: int | None = None  # bytes that may still pass before their connection is cut
    gate: threading.Event = field(default_factory=threading.Event)


class Link:
    """One connection: the client's socket and the server's."""

    def __init__(self, client: socket.socket, server: socket.socket):
        self.ends = client, server
        self.last: Way | None = None

    def cut(self) -> None:
        for end in self.ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # the peer was faster
                continue


class CuttingProxy:
    """Forwards from its own port of the loopback address to `target`, a (host, port) or a unix socket's path.

    sent, received     bytes that arrived from the client, from the server
    round_trips        times a client spoke first or after its server had spoken. A client that goes on
                       sending while answers arrive (a pipeline) is counted too high.
    """

    def __init__(self, target: tuple[str, int] | str):
        self.target = target
        self.port: int | None = None
        self.round_trips = 0
        self._to_server, self._to_client = Way(), Way()
        self._links: set[Link] = set()
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._serving: list[threading.Thread] = []
        self._cuts = 0
        self.resume()

    # life

    def start(self) -> None:
        """Accept connections; on the same port as before if it was started before."""
        self._listener = socket.create_server(('127.0.0.1', self.port or 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Refuse new connections and cut those that exist; return when no thread of the proxy runs any more."""
        if self._listener is None:
            return
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() does not
        self._listener.close()
        self._listener = None
        self.resume()
        self._join(self._accepting)  # what it was about to accept is there then
        self.cut()
        for thread in self._serving:
            self._join(thread)

    def __enter__(self) -> 'CuttingProxy':
        self.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.stop()

    # counting

    @property
    def sent(self) -> int:
        return self._to_server.arrived

    @property
    def received(self) -> int:
        return self._to_client.arrived

    def reset(self) -> None:
        """Set the three counts to 0."""
        with self._changed:
            self.round_trips = self._to_server.arrived = self._to_client.arrived = 0

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Return when condition() holds; it is looked at after every arrival and every cut."""
        with self._changed:
            if not self._changed.wait_for(condition, seconds):
                raise TimeoutError(f'{condition} does not hold after {seconds} s')

    # faults

    @property
    def cuts(self) -> int:
        """How many connections cut_after() has cut."""
        return self._cuts

    def cut(self) -> None:
        """Cut all connections now. New ones are accepted."""
        with self._changed:
            links = list(self._links)
        for link in links:
            link.cut()

    def cut_after(self, *, sent: int | None = None, received: int | None = None) -> None:
        """Let so many more bytes pass to the server or to the client, then cut the connection they took.

        Happens once: later connections live until the next call. 0 drops the next bytes that come.
        """
        with self._changed:
            self._to_server.fuse, self._to_client.fuse = sent, received

    def pause(self, *, sent: bool = True, received: bool = True) -> None:
        """Hold back what comes from the client (`sent`) or from the server, as a dead network would."""
        for way, held in ((self._to_server, sent), (self._to_client, received)):
            if held:
                way.gate.clear()

    def resume(self) -> None:
        """Forward again, beginning with what was held back."""
        self._to_server.gate.set()
        self._to_client.gate.set()

    def _connect(self) -> socket.socket:
        if not isinstance(self.target, str):
            return socket.create_connection(self.target)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self.target)
        return server

    # threads

    @staticmethod
    def _spawn(target: Callable, *args) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    @staticmethod
    def _join(thread: threading.Thread) -> None:
        thread.join(SECONDS_TO_END)
        if thread.is_alive():
            raise TimeoutError(f'{thread} still runs after {SECONDS_TO_END} s')

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # stop()
                return
            try:
                server = self._connect()
            except OSError:  # no server: the client sees its connection closed
                client.close()
                continue
            for end in client, server:
                if end.family != socket.AF_UNIX:
                    # Else what follows in a long answer waits until the first part was acknowledged, up to 40 ms.
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            link = Link(client, server)
            with self._changed:
                self._links.add(link)
            self._serving = [thread for thread in self._serving if thread.is_alive()]
            self._serving.append(self._spawn(self._serve, link))

    def _serve(self, link: Link) -> None:
        client, server = link.ends
        back = self._spawn(self._pump, link, self._to_client, server, client)
        self._pump(link, self._to_server, client, server)
        back.join()
        with self._changed:
            self._links.discard(link)
        client.close()
        server.close()

    def _pump(self, link: Link, way: Way, source: socket.socket, sink: socket.socket) -> None:
        """Forward until either end closes or the connection is cut; then end the other direction too."""
        try:
            while data := source.recv(1 << 16):
                self._arrived(link, way, len(data))
                way.gate.wait()
                data, burnt = self._burn(way, data)
                sink.sendall(data)
                if burnt:
                    break
            way.gate.wait()  # a dead network does not tell that the other end closed, either
        except OSError:  # cut while receiving or sending
            return
        finally:
            link.cut()

    def _arrived(self, link: Link, way: Way, size: int) -> None:
        with self._changed:
            way.arrived += size
            if way is self._to_server and link.last is not way:
                self.round_trips += 1
            link.last = way
            self._changed.notify_all()

    def _burn(self, way: Way, data: bytes) -> tuple[bytes, bool]:
        """Return what may pass, and whether the connection is to be cut then."""
        with self._changed:
            if way.fuse is None:
                return data, False
            if len(data) < way.fuse:
                way.fuse -= len(data)
                return data, False
            data, way.fuse = data[: way.fuse], None
            self._cuts += 1
            self._changed.notify_all()
            return data, True


def join_all_but(these: list) -> None:
    """Wait for the threads of a proxy, which end when their connections do."""
    for thread in set(threading.enumerate()) - set(these):
        if thread.daemon and not thread.name.startswith('relstore'):      # those of a storage end when it is closed
            thread.join(10)
