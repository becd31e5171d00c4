"""An S3 server of our own: moto's, in a process of its own."""

import functools
import http.client
import importlib.util
import os
import sys
import threading
import unittest
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from relstore.tests.support.servers.server import Server, SharedServer, cannot_run

CREDENTIALS = {'AWS_ACCESS_KEY_ID': 'AKIATESTTESTTESTTEST', 'AWS_SECRET_ACCESS_KEY': 'a-secret-that-nobody-may-read',
               'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_EC2_METADATA_DISABLED': 'true'}


def require_s3(test: unittest.TestCase) -> None:
    """Skip the test if it cannot have an S3 server; fail it where CI=true."""
    if not _is_there():
        cannot_run(test, "moto's server is not installed (pip install s3fs 'moto[s3]' flask flask-cors)")


def _is_there() -> bool:
    return all(importlib.util.find_spec(name) for name in ('moto', 'flask', 's3fs'))


class S3Server(Server):
    """It keeps everything in memory, and takes any credentials until it is told otherwise."""

    name = 'moto'
    ready = 'Running on'
    user = 'nobody'

    @property
    def endpoint(self) -> str:
        return f'http://127.0.0.1:{self.port}'

    def call(self, path: str, data: bytes) -> bytes:
        """Send a request without credentials."""
        request = urllib.request.Request(self.endpoint + path, data, {'Content-Type': 'text/plain'})
        with urllib.request.urlopen(request) as found:
            return found.read()

    def create_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def client(self, service: str = 's3'):
        """Return a client of Amazon's own library."""
        import boto3
        return boto3.client(service, endpoint_url=self.endpoint, region_name=CREDENTIALS['AWS_DEFAULT_REGION'],
                            aws_access_key_id=CREDENTIALS['AWS_ACCESS_KEY_ID'],
                            aws_secret_access_key=CREDENTIALS['AWS_SECRET_ACCESS_KEY'])

    @contextmanager
    def asking_for_credentials(self):
        """Have it refuse credentials that it has not given itself."""
        self.call('/moto-api/reset-auth', b'0')
        try:
            yield
        finally:
            self.call('/moto-api/reset-auth', b'inf')

    def _initialize(self) -> list[str | Path]:
        return ['true']  # it has no data

    def _command(self) -> list[str | Path]:
        return [sys.executable, '-c', 'from moto.server import main; main()', '-H', '127.0.0.1', '-p', str(self.port)]

    def _environment(self) -> dict[str, str]:
        return super()._environment() | {'PYTHONPATH': os.pathsep.join(sys.path), 'HOME': str(self.directory)}


class RefusingProxy:
    """Forwards requests to a server, but for those to which `answer(method, path)` returns a status and a code."""

    def __init__(self, server: S3Server):
        self._server = server
        self.answer: Callable[[str, str], tuple[int, str] | None] = lambda method, path: None

    def __enter__(self) -> 'RefusingProxy':
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def handle_one_request(self):
                self.raw_requestline = self.rfile.readline()
                self.close_connection = True
                if self.raw_requestline and self.parse_request():
                    proxy._handle(self)

            def log_message(self, *args):
                """It goes to the test's output otherwise."""

        self._http = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        data = request.rfile.read(int(request.headers.get('Content-Length', 0)))
        found = self.answer(request.command, request.path)
        if found is None:
            connection = http.client.HTTPConnection(*self._server.address)
            connection.request(request.command, request.path, data, dict(request.headers))
            answer = connection.getresponse()
            status, headers, body = answer.status, answer.getheaders(), answer.read()
            connection.close()
        else:
            status, code = found
            secret = CREDENTIALS['AWS_SECRET_ACCESS_KEY']       # as some servers quote what was signed
            body = (f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>'
                    f'<Message>It said {secret}.</Message></Error>').encode()
            headers = [('Content-Type', 'application/xml'), ('Content-Length', str(len(body)))]
        request.send_response_only(status)
        for name, value in [*headers, ('Connection', 'close')]:
            if name.lower() != 'connection' or value == 'close':
                request.send_header(name, value)
        request.end_headers()
        if request.command != 'HEAD':
            request.wfile.write(body)


def _find() -> S3Server | None:
    return S3Server({}) if _is_there() else None


S3Layer = SharedServer('S3Layer', __name__, _find, require_s3)


def shared_s3(test: unittest.TestCase) -> S3Server:
    """Return the server of all tests of this process that need one beside the server of their layer."""
    require_s3(test)
    if not _shared:
        _read_definitions_once()
        _shared.append(S3Server({}))
        _shared[0].start()
    return _shared[0]


def _read_definitions_once() -> None:
    """Each client reads a megabyte of JSON that says what S3 can be asked: half of what a small test takes."""
    from botocore.loaders import JSONFileLoader
    read = functools.cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda self, path: read(path)


_shared: list[S3Server] = []
