"""Options: every name and value that is taken, refused or warned about."""
import logging
import unittest
from dataclasses import FrozenInstanceError, asdict, fields
from types import SimpleNamespace

from relstore.errors import ConfigurationError
from relstore.options import REFUSED, WITHOUT_EFFECT, Options, known_names, nearest
from relstore.tests.support.relstorage_options import HONOURED, RELSTORAGE_OPTIONS


class DefaultsTests(unittest.TestCase):

    def test_defaults(self):
        expected = {
            'name': None, 'read_only': False, 'keep_history': True, 'create_schema': True,
            'commit_lock_timeout': 30, 'cache_local_mb': 64, 'cache_local_object_max': 1048576,
            'cache_servers': None, 'cache_module_name': None, 'cache_prefix': '', 'poll_interval': 0,
            'cache_local_dir': None, 'cache_local_dir_write_max_size': None,
            'blob_dir': None, 'shared_blob_dir': False, 'blob_cache_size': None, 'blob_cache_fill_on_commit': False,
            'blob_chunk_size': 1048576, 'blob_store': None, 'blob_store_grace': 86400,
            'pool_size': 64, 'pool_timeout': 30, 'poll_limit': 100_000, 'pack_gc': True,
            'pack_dry_run': False, 'pack_prepack_only': False, 'pack_skip_prepack': False,
            'pack_batch_timeout': 1.0, 'pack_duty_cycle': 0.5, 'pack_max_delay': 20.0}
        self.assertEqual(asdict(Options()), expected)

    def test_are_immutable(self):
        with self.assertRaises(FrozenInstanceError):
            Options().keep_history = False

    def test_every_option_has_help(self):
        for option in fields(Options):
            with self.subTest(option.name):
                self.assertTrue(option.metadata['help'].endswith('.'))
                self.assertNotIn('  ', option.metadata['help'])

    def test_no_option_is_both_honoured_and_without_effect(self):
        self.assertEqual(len(set(known_names())), len(known_names()))


class MakeTests(unittest.TestCase):

    def test_keywords(self):
        with self.assertNoLogs('relstore'):
            made = Options.make(keep_history=False, pool_size=8)
        self.assertEqual(made, Options(keep_history=False, pool_size=8))

    def test_unknown_option_names_it_and_the_nearest(self):
        for given, expected in [('keep_histroy', 'keep_history'), ('poolsize', 'pool_size'),
                                ('blobdir', 'blob_dir'), ('x', nearest('x', known_names()))]:
            with self.subTest(given):
                with self.assertRaises(ConfigurationError) as caught:
                    Options.make(**{given: 1})
                self.assertEqual(str(caught.exception),
                                 f'There is no option {given!r}; the nearest known name is {expected!r}.')

    def test_every_option_of_relstorage_is_honoured_warned_about_or_refused(self):
        for name in RELSTORAGE_OPTIONS:
            name = name.replace('-', '_')
            with self.subTest(name):
                self.assertIn(name, known_names())
                if name in REFUSED:
                    with self.assertRaisesRegex(ConfigurationError, name.replace('_', '-')):
                        Options.make(**{name: 'x'})
                elif name not in HONOURED:
                    with self.assertLogs('relstore', logging.WARNING) as logs:
                        self.assertEqual(Options.make(**{name: 'x'}), Options())
                    [record] = logs.records
                    self.assertEqual(record.getMessage(), f'{name.replace("_", "-")} {WITHOUT_EFFECT[name]}')

    def test_warning_says_what_is_missing(self):
        with self.assertLogs('relstore', logging.WARNING) as logs:
            Options.make(replica_timeout=600)
        self.assertEqual(logs.records[0].getMessage(), 'replica-timeout is not available yet in this version; '
                                                       'no session goes to a replica that it could leave.')

    def test_none_is_not_worth_a_warning(self):
        with self.assertNoLogs('relstore'):
            Options.make(replica_timeout=None, replica_conf=None)

    def test_poll_interval_needs_servers(self):
        with self.assertLogs('relstore', logging.WARNING) as logs:
            Options.make(poll_interval=60)
        self.assertEqual(logs.records[0].getMessage(), 'poll-interval has no effect without cache-servers: every '
                                                       'transaction asks the database what changed.')
        with self.assertNoLogs('relstore'):
            Options.make(poll_interval=60, cache_servers='localhost:11211')
            Options.make(poll_interval=0)

    def test_relstorages_name_of_poll_limit(self):
        self.assertEqual(Options.make(cache_delta_size_limit=7), Options(poll_limit=7))

    def test_both_names_of_poll_limit(self):
        with self.assertRaises(ConfigurationError) as caught:
            Options.make(cache_delta_size_limit=7, poll_limit=7)
        self.assertEqual(str(caught.exception),
                         'cache-delta-size-limit and poll-limit are two names of one option: '
                         'give only one of them.')


class ValueTests(unittest.TestCase):

    bad = [
        ('name', 7), ('read_only', 'no'), ('keep_history', None), ('create_schema', 1), ('pack_gc', 0),
        ('commit_lock_timeout', 0), ('commit_lock_timeout', -1), ('commit_lock_timeout', 86401),
        ('commit_lock_timeout', float('inf')), ('commit_lock_timeout', float('nan')),
        ('commit_lock_timeout', '30'), ('pool_timeout', 0), ('pool_timeout', True),
        ('pool_size', 1), ('pool_size', 2.5), ('pool_size', True),
        ('cache_local_mb', -1), ('cache_local_mb', '64'), ('cache_local_object_max', -1),
        ('poll_limit', 0), ('poll_limit', -1), ('poll_interval', -1), ('poll_interval', None),
        ('cache_servers', 11211), ('cache_prefix', None), ('cache_prefix', 'two words'), ('cache_prefix', 'ä'),
        ('cache_prefix', 'x' * 101), ('cache_prefix', 'x\n'), ('cache_local_dir', 7),
        ('cache_local_dir_write_max_size', -1), ('cache_local_dir_write_max_size', '1mb'),
        ('pack_dry_run', 0), ('pack_prepack_only', 'yes'), ('pack_skip_prepack', None), ('pack_batch_timeout', -1),
        ('pack_batch_timeout', '5'), ('pack_duty_cycle', -0.1), ('pack_duty_cycle', float('nan')),
        ('pack_duty_cycle', float('inf')), ('pack_max_delay', -1), ('pack_max_delay', 86401),
    ]
    good = [
        ('name', ''), ('commit_lock_timeout', 0.5), ('commit_lock_timeout', 86400), ('pool_timeout', 0.001),
        ('pool_size', 2), ('cache_local_mb', 0), ('cache_local_object_max', 0), ('poll_limit', 1),
        ('poll_interval', 3600), ('cache_prefix', 'zodb:' * 20), ('cache_local_dir', 'var'),
        ('cache_local_dir_write_max_size', 0), ('pack_batch_timeout', 0), ('pack_batch_timeout', 3600),
        # What RelStorage takes to mean that a pack never rests.
        ('pack_duty_cycle', 0), ('pack_duty_cycle', 1), ('pack_duty_cycle', 1.5), ('pack_max_delay', 0),
    ]

    def test_refused(self):
        for name, value in self.bad:
            with self.subTest(name, value=value):
                with self.assertRaises(ConfigurationError) as caught:
                    Options(**{name: value})
                self.assertRegex(str(caught.exception), r'^[a-z-]+ is .+: allowed is .+\.$')
                self.assertIn(f'{name.replace("_", "-")} is {value!r}', str(caught.exception))

    def test_allowed(self):
        for name, value in self.good:
            with self.subTest(name, value=value):
                self.assertEqual(getattr(Options(**{name: value}), name), value)

    def test_sentence(self):
        with self.assertRaises(ConfigurationError) as caught:
            Options.make(pool_size=1)
        self.assertEqual(str(caught.exception), 'pool-size is 1: allowed is a whole number, 2 or more.')


class SectionTests(unittest.TestCase):

    def test_none_and_missing_attributes_are_not_set(self):
        section = SimpleNamespace(keep_history=False, pool_size=None, adapters=[])
        self.assertEqual(Options.from_section(section), Options(keep_history=False))

    def test_warns_once_for_each_option(self):
        with self.assertLogs('relstore', logging.WARNING) as logs:
            Options.from_section(SimpleNamespace(blob_cache_size_check='x', replica_timeout='y', commit_lock_id=None))
        self.assertEqual([record.args[0] for record in logs.records], ['blob-cache-size-check', 'replica-timeout'])

    def test_can_be_read_without_warning(self):
        with self.assertNoLogs('relstore'):
            Options.from_section(SimpleNamespace(replica_timeout='x'), warn=False)
