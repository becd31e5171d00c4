"""A listener that speaks as much of Oracle's protocol as its refusals take.

It answers the first message of a client, a connect, as its script says, and then each further message: with a packet,
with a part of one, or with nothing; and closes at the end of the script.
"""
import socket
import struct
import threading
from collections.abc import Sequence

REFUSE, ACCEPT, DATA = 4, 2, 6
VERSION = 318           # of the protocol, as of Oracle 19c
ERROR_MESSAGE = 4
# What stands before the number of an error and is 0, each in one byte: see the class Message of the driver.
BEFORE_THE_NUMBER = bytes(28)


def refusal(code: int) -> bytes:
    """What a listener says that does not let a client through: ORA-12514, for instance."""
    text = f'(DESCRIPTION=(TMP=)(VSNNUM=318767104)(ERR={code})(ERROR_STACK=(ERROR=(CODE={code})(EMFI=4))))'.encode()
    return _packet(REFUSE, struct.pack('>BBH', 34, 0, len(text)) + text)


def acceptance() -> bytes:
    return _packet(ACCEPT, struct.pack('>HH10xB9xI5xI', VERSION, 0, 0, 8192, 0))


def error(code: int, text: str) -> bytes:
    """What a server says to a message that it cannot do."""
    message = f'ORA-{code:05}: {text}'.encode()
    number = code.to_bytes(4, 'big').lstrip(b'\0')
    body = bytes([ERROR_MESSAGE]) + BEFORE_THE_NUMBER + bytes([len(number)]) + number + bytes(3) + bytes(
        [len(message)]) + message
    return _long_packet(DATA, struct.pack('>H', 0) + body)


def _packet(kind: int, body: bytes) -> bytes:
    return struct.pack('>HHBBH', len(body) + 8, 0, kind, 0, 0) + body


def _long_packet(kind: int, body: bytes) -> bytes:
    """After an acceptance lengths have four bytes."""
    return struct.pack('>IBBH', len(body) + 8, kind, 0, 0) + body


class Listener:
    """answers: what is said to each message of a client in turn. All clients are answered alike."""

    def __init__(self, *answers: bytes):
        self._answers: Sequence[bytes] = answers
        self._socket = socket.create_server(('127.0.0.1', 0))
        self.port = self._socket.getsockname()[1]
        self.dsn = f'127.0.0.1:{self.port}/pdb'
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> 'Listener':
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)     # which wakes who accepts
        self._socket.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:         # it was closed
                return
            with client:
                client.settimeout(10)
                for answer in self._answers:
                    if not client.recv(65536):
                        break
                    client.sendall(answer)
