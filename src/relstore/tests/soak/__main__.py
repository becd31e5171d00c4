"""The command: python -m relstore.tests.soak --help."""
import argparse
import json
import random
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from relstore.tests.soak import __doc__ as about
from relstore.tests.soak.clients import POLLS, THREADS
from relstore.tests.soak.places import PLACES, POLL_INTERVAL, place, unavailable
from relstore.tests.soak.run import Run
from relstore.tests.soak.verdict import findings, table

TOLD = 3                # failures; one fault makes many
OPTIONS = {'cache_local_mb': 1, 'commit_lock_timeout': 60}


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    adapters = given.adapter if 'all' not in given.adapter else list(PLACES)
    given.out.mkdir(parents=True, exist_ok=True)
    succeeded = True
    for adapter in adapters:
        if reason := unavailable(adapter, given.memcached):
            print(f'{adapter}: left out, {reason}')
            succeeded = succeeded and 'all' in given.adapter
            continue
        data = soak(adapter, given)
        text = report(data)
        (given.out / f'{adapter}.json').write_text(json.dumps(data, indent=1), 'utf-8')
        (given.out / f'{adapter}.txt').write_text(text, 'utf-8')
        print(text, flush=True)
        succeeded = succeeded and data['succeeded']
    return 0 if succeeded else 1


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='python -m relstore.tests.soak', description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=10, help='of each adapter (default: 10)')
    parser.add_argument('--adapter', nargs='+', choices=[*PLACES, 'all'], default=['postgresql'], metavar='NAME',
                        help=f'{", ".join(PLACES)}, or all of them in turn (default: postgresql)')
    parser.add_argument('--seed', type=int, help='of what is chosen at random (default: another each time, printed)')
    parser.add_argument('--processes', type=int, default=2, help=f'of {THREADS} threads for each of the two databases')
    parser.add_argument('--pause', type=float, default=5, metavar='MS',
                        help='milliseconds between two transactions of a thread, in the mean (default: 5)')
    parser.add_argument('--interval', type=float, metavar='SECONDS',
                        help='between two samples (default: a sixtieth of the run, 2 to 10)')
    parser.add_argument('--disturb', type=float, metavar='SECONDS',
                        help='between two disturbances, in the mean (default: a fifth of the run, at most 60)')
    parser.add_argument('--memcached', action='store_true',
                        help=f'between the processes, with a poll-interval of {POLL_INTERVAL} s; it is disturbed too')
    parser.add_argument('--option', action='append', default=[], metavar='NAME=VALUE', type=option,
                        help='an option of RelStore, as cache_local_mb=8; repeatedly')
    parser.add_argument('--out', type=Path, default=Path('var/soak'), help='directory for the figures')
    return parser


def option(text: str) -> tuple[str, Any]:
    """Return name and value of NAME=VALUE, the value as JSON understands it, or else as text."""
    name, equals, value = text.partition('=')
    if not equals:
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def soak(adapter: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run once; return all that is to be told."""
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    seconds = 60 * given.minutes
    settings = {
        'minutes': given.minutes, 'processes': given.processes, 'seed': seed, 'pause': given.pause / 1000,
        'interval': given.interval or min(10, max(2, seconds / 60)), 'disturb': given.disturb or min(60, seconds / 5),
        'options': OPTIONS | dict(given.option),
    }
    print(f'{adapter}: {given.minutes:g} minutes, seed {seed}', flush=True)
    with place(adapter) as there:
        version = there.version()
        if given.memcached:
            there.add_memcached()
        run = Run(there, **settings)
        run.go()
        found = findings(run.samples, run.bound_of_sessions())
        return {
            'adapter': adapter, 'version': version, 'date': datetime.now(timezone.utc).isoformat(timespec='seconds'),
            'settings': settings | {'options': run.options}, 'dead': there.dead, 'counts': dict(run.counts()),
            'disturbed': dict(run.disturbed),
            'failures': run.failures, 'findings': [vars(finding) for finding in found],
            'succeeded': not run.failures and all(finding.holds is not False for finding in found),
            'text': [str(finding) for finding in found], 'samples': run.samples,
        }


def report(data: dict[str, Any]) -> str:
    """Return what a reader wants to know, as text."""
    settings, counts = data['settings'], data['counts']
    done = [f'{counts.get("commits", 0):,} commits', f'{counts.get("reads", 0):,} read-only transactions',
            f'{counts.get("conflicts", 0):,} conflicts',
            *(f'{counts.get(name, 0):,} {name.replace("_", " ")}' for name in POLLS)]
    met = [f'{count:,} {kind}' for kind, count in sorted(counts.items())
           if kind not in ('commits', 'reads', 'conflicts', *POLLS)]
    lines = [
        title := f'{data["version"]}, {settings["minutes"]:g} minutes, {data["date"][:10]}',
        '=' * len(title), '',
        f'{settings["processes"]} processes of {2 * THREADS} threads, {1000 * settings["pause"]:g} ms between two '
        f'transactions of a thread; seed {settings["seed"]}',
        f'Options: {", ".join(f"{name}={value}" for name, value in settings["options"].items())}',
        f'Done: {", ".join(done)}',
        f'Met: {", ".join(met) or "no error"}',
        f'Disturbed: {", ".join(f"{count} x {way}" for way, count in data["disturbed"].items()) or "never"}',
        f'Dead: {data["dead"]}', '', table(data['samples']), '', *data['text'], '',
    ]
    lines += [f'FAILED: {failure}' for failure in data['failures'][:TOLD]]
    lines.append(f'{"All held." if data["succeeded"] else "NOT ALL HELD."}\n')
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main())
