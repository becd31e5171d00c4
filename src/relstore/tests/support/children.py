"""Child processes of a test."""
import os
import signal
import subprocess
import sys
import traceback
import unittest

from relstore.tests.support.servers import open_process, wait_for_exit


def in_child(test, work) -> None:
    """Run work() in a child process; fail as it fails."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            work()
            text = b''
        except BaseException:
            text = traceback.format_exc().encode()
        finally:
            os.write(ours, text)
            os._exit(0)
    os.close(ours)
    with open(theirs, 'rb') as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if text or status:
        test.fail(f'{status} {text.decode()}')


def environment():
    """For a child process that imports what we can import."""
    return os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}


def goes_with_its_run(test: unittest.TestCase, kind: type) -> None:
    """Kill a process that has started a server of this kind; wait until the server has ended."""
    program = (
        'import signal\n'
        f'from relstore.tests.support.servers import {kind.__name__} as Server\n'
        'server = Server()\n'
        'server.start()\n'
        'print(server.process.pid, server.directory, flush=True)\n'
        'signal.pause()\n'
    )
    with subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, text=True, env=environment()) as run:
        pid, directory = run.stdout.readline().split()
        test.addCleanup(subprocess.run, ['rm', '-rf', directory], check=True)
        server = open_process(int(pid))
        test.addCleanup(os.close, server)
        run.send_signal(signal.SIGKILL)
    wait_for_exit(server)
