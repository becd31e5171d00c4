"""Programs that use a database as they are told: relstore of another version, and RelStorage."""
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import relstore
from relstore.tests.support import version_client

PATIENCE = 120      # seconds
PROJECT = Path(__file__).resolve().parents[4]
SOURCE = Path(relstore.__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name('relstorage_client.py')     # it imports what is not here
PYTHON = os.environ.get('RELSTORE_TEST_RELSTORAGE') or str(PROJECT / '.venv-bench' / 'bin' / 'python')


class Program:
    """A process with the relstore that is in `source`."""

    def __init__(self, source: Path):
        others = [path for path in sys.path if path and Path(path).resolve() != SOURCE]
        self._process = subprocess.Popen(
            [sys.executable, '-c', f'import runpy; runpy.run_path({version_client.__file__!r}, run_name="__main__")'],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {'PYTHONPATH': os.pathsep.join([str(source), *others])})

    def tell(self, what: str, **arguments) -> None:
        print(json.dumps([what, arguments]), file=self._process.stdin, flush=True)

    def answer(self):
        """Return what it answers to the last that it was told."""
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise TimeoutError(f'no answer within {PATIENCE} s')
        answer = json.loads(self._process.stdout.readline())
        if 'error' in answer:
            raise AssertionError(answer['error'])
        return answer['answer']

    @property
    def has_answered(self) -> bool:
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def ask(self, what: str, **arguments):
        self.tell(what, **arguments)
        return self.answer()

    def end(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process.stdout.close()


class Peer(Program):
    """A process with RelStorage."""

    def __init__(self):
        environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
        self._process = subprocess.Popen([PYTHON, PROGRAM], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True, env=environment)

    def dies(self, what: str, **arguments) -> int:
        """Tell it something that it does not survive; return its exit status."""
        self.tell(what, **arguments)
        return self._process.wait(PATIENCE)
