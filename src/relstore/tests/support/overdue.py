"""A test that hangs fails and says where, and the others run: nobody waits for it until the whole run is cut off."""
import faulthandler
import signal
import threading
import unittest

# Seconds that no test takes, on however busy a machine.
LIMIT = 1200


def limit(test: unittest.TestCase) -> None:
    """Have this test fail after LIMIT seconds; to be called in its setUp.

    Where a driver's own code hangs, which hears of no signal, the process ends a minute later, and its servers with it.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def fail(number, frame):
        faulthandler.dump_traceback()
        raise TimeoutError(f'{test.id()} has not come to its end in {LIMIT} s')

    test.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, fail))
    signal.alarm(LIMIT)
    test.addCleanup(signal.alarm, 0)
    faulthandler.dump_traceback_later(LIMIT + 60, exit=True)
    test.addCleanup(faulthandler.cancel_dump_traceback_later)
