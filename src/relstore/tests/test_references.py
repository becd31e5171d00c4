"""What references() finds, beside what ZODB finds."""

import pickle
import struct
import unittest

import transaction
from hypothesis import given
from hypothesis import strategies as st
from persistent import Persistent
from persistent.mapping import PersistentMapping
from persistent.wref import WeakRef
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.MappingStorage import MappingStorage
from ZODB.serialize import referencesf
from ZODB.utils import p64, u64
from zodbpickle.pickle import UnpicklingError

from relstore.references import references, unpack
from relstore.tests.support.layers import Models
from relstore.tests.support.plone import unpacked_site
from relstore.tests.support.records import Reference, pickled

CLASS = b'cproducts\nThing\n'
EMPTY_STATE = b'\x80\x03}.'

# Without LONG_BINPUT (r): in a damaged record it may ask zodbpickle for gigabytes of memo.
OPCODES = [bytes([code]) for code in b'(.012NQPRSTUVXabcdeghijlopqstu}]\x80\x81\x82\x85\x86\x88CB\n']


class Plain(Persistent):
    """A class without arguments: references to it carry the class."""


class WithArguments(Persistent):
    """A class with arguments for __new__: references to it are bare oids."""

    def __new__(cls, name):
        return super().__new__(cls)

    def __getnewargs__(self):
        return ('name',)


def record(state, protocol=3):
    return pickled(Plain, state, protocol=protocol)


def packed(*oids):
    """Return integers as references() packs them."""
    return b''.join(map(p64, oids))


class FormatTests(unittest.TestCase):
    """Every form of a reference, in records written here."""
    layer = Models

    def assertReferences(self, state, *oids):
        self.assertEqual(references(state), packed(*oids))

    def test_deletion_has_none(self):
        self.assertEqual(references(None), b'')
        self.assertEqual(references(b''), b'')

    def test_record_without_references(self):
        self.assertReferences(record({'title': 'title'}))
        self.assertReferences(record({'title': 'Question: Persistent?'}))

    def test_order_is_kept_and_duplicates_are_removed(self):
        def ref(oid):
            return Reference((p64(oid), Plain))

        self.assertReferences(record([ref(9), ref(2), ref(9), [ref(2), ref(5)]]), 9, 2, 5)

    def test_bare_oid(self):
        self.assertReferences(record([Reference(p64(2**63 + 7))]), 2**63 + 7)

    def test_weak_and_foreign_references_are_left_out(self):
        for persistent_id in (
            ['w', (p64(3),)],
            ['w', (p64(3), 'other')],
            [p64(3)],
            ['m', ('other', p64(3), Plain)],
            ['n', ('other', p64(3))],
        ):
            with self.subTest(persistent_id=persistent_id):
                self.assertReferences(record([Reference(persistent_id)]))
                self.assertReferences(record([Reference(p64(1)), Reference(persistent_id)]), 1)

    def test_references_in_the_class_and_in_keys(self):
        self.assertReferences(b'\x80\x03C\x08' + p64(4) + b'Q.' + EMPTY_STATE, 4)
        self.assertReferences(record({Reference((p64(6), Plain)): 1}), 6)

    def test_python_2_records(self):
        for oid in (7, 0x8041, 0xFFFFFFFFFFFFFFFF):
            with self.subTest(oid=oid):
                string = b'U\x08' + p64(oid)
                self.assertReferences(b'\x80\x02' + CLASS + b'.' + b'\x80\x02' + string + b'Q.', oid)
                self.assertReferences(CLASS + b'.' + b'(' + string + CLASS + b'tQ.', oid)
        latin_1_text = b'U\x04caf\xe9'
        self.assertReferences(
            b'\x80\x02' + CLASS + b'.\x80\x02' + latin_1_text + b'0U\x08' + p64(7) + b'Q.', 7
        )

    def test_oid_as_text(self):
        self.assertReferences(b'\x80\x02' + CLASS + b'.X\x08\0\0\0' + p64(7) + b'Q.', 7)
        self.assertReferences(b'\x80\x02' + CLASS + b'.X\x09\0\0\0' + p64(7)[:-1] + b'\xc3\xa9Q.', 0xE9)

    def test_oid_in_a_line(self):
        self.assertReferences(CLASS + b'.Pabcdefgh\n.', u64(b'abcdefgh'))

    def test_protocols(self):
        # The text protocol writes str(persistent_id); 1 and 2 have no bytes. So the oid is text there.
        for protocol, oid in (0, 'abcdefgh'), (1, 'abcdefgh'), (2, 'abcdefgh'), (3, b'abcdefgh'):
            with self.subTest(protocol=protocol):
                state = record({'a': Reference(oid), 'b': {1, 2}, 'c': b'bytes'}, protocol)
                self.assertReferences(state, u64(b'abcdefgh'))

    def test_protocols_that_zodb_cannot_read(self):
        for protocol in 4, 5:
            with self.subTest(protocol=protocol):
                state = record({'a': Reference(b'abcdefgh')}, protocol)
                self.assertRaises((ValueError, pickle.UnpicklingError, UnpicklingError), referencesf, state)
                self.assertIsNone(references(state))

    def test_oid_that_only_a_call_would_make_is_unknown(self):
        """Protocols 1 and 2 of Python 3 pickle bytes as a call of codecs.encode()."""
        self.assertIsNone(references(record([Reference((b'abcdefgh', Plain))], 2)))

    def test_extension_codes_and_missing_classes(self):
        for extension in (b'\x82\x07', b'\x83\x07\x01', b'\x84\x07\x01\0\0'):
            oid = b'C\x08' + p64(7)
            self.assertReferences(b'\x80\x03' + extension + b'.\x80\x03' + oid + extension + b'\x86Q.', 7)
        self.assertReferences(
            b'\x80\x03cno.such\nClass\n.\x80\x03C\x08' + p64(7) + b'cno.such\nClass\n\x86Q.', 7
        )

    def test_long_record(self):
        """Longer than the unpickler fetches at once."""
        oids = range(1, 40_000)
        self.assertReferences(record([(str(oid) * 5, Reference((p64(oid), Plain))) for oid in oids]), *oids)

    def test_damage_is_unknown(self):
        whole = record({'a': Reference(p64(1)), 'b': Reference((p64(2), Plain))})
        for state in (
            whole[:-1],  # cut
            b'.zcompressed',
            b'.ecncrypted',
            b'C\x08',
            record([Reference(b'seven b')]),
            record([Reference('\u20ac' * 8)]),
            record([Reference(17)]),
            record([Reference(())]),
            CLASS + b".P(b'\\x00', <class 'Plain'>)\n.",
        ):
            with self.subTest(state=state):
                self.assertIsNone(references(state))

    def test_a_record_without_the_opcodes_has_none(self):
        """Damaged or not: what cannot hold a reference is not read, whatever P its names have."""
        self.assertReferences(pickle.dumps(Plain, 3))  # the class alone
        self.assertReferences(b'\x80\x03cPersistentPackage\nPerson\nq\x00.')
        self.assertReferences(b'\x80\x03' + CLASS + b'.\x80\x03Pabcdefgh\n.', u64(b'abcdefgh'))
        self.assertReferences(b'\x80\x03cPortfolio\nPosition1\n.' + EMPTY_STATE)

    @given(st.binary())
    def test_bytes_never_raise(self, state):
        self.assertIsInstance(references(state), (bytes, type(None)))

    @given(st.lists(st.sampled_from(OPCODES)))
    def test_opcodes_never_raise(self, opcodes):
        self.assertIsInstance(references(b''.join(opcodes)), (bytes, type(None)))

    @given(st.data())
    def test_damaged_records_never_raise(self, data):
        state = bytearray(
            record({'a': Reference(p64(1)), 'b': [Reference((p64(2), Plain))] * 2, 'c': 'text'})
        )
        at = data.draw(st.integers(0, len(state) - 1))
        state[at] = data.draw(st.sampled_from(sorted(set(range(256)) - set(b'r'))))
        self.assertIsInstance(references(bytes(state)), (bytes, type(None)))


class UnpackTests(unittest.TestCase):
    def test_unpack(self):
        self.assertEqual(unpack(b''), ())
        self.assertEqual(unpack(packed(1, 2**64 - 1)), (1, 2**64 - 1))

    def test_half_an_oid_is_an_error(self):
        self.assertRaises(struct.error, unpack, b'\0' * 12)


class ZODBTests(unittest.TestCase):
    """Records that ZODB wrote."""

    def assertSame(self, state):
        self.assertEqual(references(state), b''.join(dict.fromkeys(referencesf(state))))

    def test_objects_of_a_connection(self):
        databases = {}
        db = DB(MappingStorage(), database_name='main', databases=databases)
        self.addCleanup(db.close)
        other = DB(MappingStorage(), database_name='other', databases=databases, xrefs=True)
        self.addCleanup(other.close)
        connection = db.open()
        abroad = connection.get_connection('other').root()
        abroad['plain'], abroad['arguments'] = Plain(), WithArguments('name')
        root = connection.root()
        root['plain'], root['arguments'] = Plain(), WithArguments('name')
        root['weak'], root['mapping'] = WeakRef(root['plain']), PersistentMapping()
        transaction.commit()
        root['weak only'] = [WeakRef(root['plain'])]
        root['abroad'] = [abroad['plain'], abroad['arguments']]
        transaction.commit()

        state, _ = db.storage.load(root._p_oid)
        self.assertSame(state)
        self.assertEqual(
            set(unpack(references(state))),
            {u64(root[key]._p_oid) for key in ('plain', 'arguments', 'mapping')},
        )
        for obj in root['plain'], root['mapping']:
            self.assertEqual(references(db.storage.load(obj._p_oid)[0]), b'')

    def test_real_site(self):
        storage = FileStorage(unpacked_site(self), read_only=True)
        self.addCleanup(storage.close)
        records = 0
        for txn in storage.iterator():
            for rec in txn:
                records += 1
                if rec.data is None:
                    self.assertEqual(references(rec.data), b'')
                else:
                    self.assertSame(rec.data)
        self.assertGreater(records, 1000)
