"""The current process id: os.getpid() each time would take a tenth of a load from SQLite."""
import os

pid = os.getpid()


def _now_in_child() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_now_in_child)
