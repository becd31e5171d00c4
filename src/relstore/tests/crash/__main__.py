"""The command: python -m relstore.tests.crash --help."""
import argparse
import random
import sys

from relstore.tests.crash import __doc__ as about
from relstore.tests.crash.storm import Storm
from relstore.tests.support.servers import DurableLayer, memcached_program, pgbouncer_program, postgresql_programs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m relstore.tests.crash', description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=10, help='how long the storm takes (default: 10)')
    parser.add_argument('--seed', type=int, help='of what is chosen at random (default: another each time, printed)')
    given = parser.parse_args(arguments)
    if not (postgresql_programs() and memcached_program() and pgbouncer_program()):
        print('This needs PostgreSQL, memcached and pgbouncer (apt-get install postgresql memcached pgbouncer).')
        return 1
    DurableLayer.setUp()
    try:
        storm = Storm(DurableLayer.server, 60 * given.minutes,
                      random.randrange(1 << 32) if given.seed is None else given.seed)
        storm.go()
    finally:
        DurableLayer.tearDown()
    print(storm.report())
    return 1 if storm.faults else 0


if __name__ == '__main__':
    sys.exit(main())
