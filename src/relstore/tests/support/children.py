"""Child processes of a test."""
import os
import signal
import sys
import traceback


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
