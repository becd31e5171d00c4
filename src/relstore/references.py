"""References: which objects a record refers to, and its class.

A record is two pickles, one after the other: the object's class, then its state. A reference in them is a
persistent id, pushed by one of two opcodes, ``BINPERSID`` (``Q``) and ``PERSID`` (``P``). The ids that ZODB
writes, or once wrote:

    (oid, class)                    an ordinary reference
    oid                             the same, to an object whose ``__new__`` takes arguments
    ['w', (oid,)]  [oid]            weak: does not keep its object alive
    ['m', (database, oid, class)]   into another database
    ['n', (database, oid)]          the same, without the class

Only the first two count here: what they refer to must stay as long as the record does.
An oid is 8 bytes; in records written by Python 2 it is a ``str`` of 8 characters.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zlib
from contextlib import suppress
from typing import Any

from zodbpickle.pickle import Unpickler

_PROTO, _STOP = b'\x80.'
# How a record begins: with PROTO, or, before protocol 2, GLOBAL or MARK; compressed by zc.zlibstorage, with .z.
_BEGINNINGS, _COMPRESSED = (b'\x80', b'c', b'('), b'.z'
# Anything that may be an oid below 2^40, overlapping or not.
_OID = re.compile(rb'(?s)(?=(\0\0\0.{5}))').finditer
# PERSID's id ends with its line, and an oid is 8 bytes long. Class names often contain a P, but rarely like this.
_PERSID = re.compile(rb'P[^\n]{8}\n').search

# How much of a record to search for its class, and how much of the name to show.
HEAD_BYTES, NAME_BYTES = 4096, 300
# How much of an error to show.
REASON_BYTES = 100
# How ZODB writes a class: as a global, alone or first in a tuple.
_GLOBAL = re.compile(rb'(?:\x80.)?\(?c([^\n]+)\n([^\n]+)\n', re.DOTALL)


class _Record(io.BytesIO):
    """A record as a file. With peek() the unpickler fetches it whole, not byte by byte, which is twice as fast."""

    def peek(self, size: int) -> bytes:
        here = self.tell()
        return self.getvalue()[here : here + size]


def references(state: bytes | None) -> bytes | None:
    """Return the oids that a record refers to, 8 big-endian bytes each, or None if it cannot be read.

    They are in the order of the record, each once; ``b''`` means that there are none. A deletion
    (state None) has none. No class is loaded, and no damage to the record raises an exception.
    """
    if not state:
        return b''
    # Without either opcode a pickle pushes no reference. Check that it is a pickle: a compressed or encrypted
    # record may lack them and still refer to others.
    if (state[0] == _PROTO and state[-1] == _STOP and b'Q' not in state
            and (b'P' not in state or _PERSID(state) is None)):
        return b''
    try:
        return _pack(_persistent_ids(state))
    except Exception:  # Damage shows as anything: EOFError, KeyError, MemoryError, even SystemError.
        return None


def why_unreadable(state: bytes) -> str:
    """Return why references() cannot tell what a record refers to, as the end of a sentence."""
    if state[:2] == _COMPRESSED:
        return 'it is compressed, as by zlibstorage, and no such section is around its storage'
    if is_wrapped(state):
        return 'it does not begin as a pickle does, so it may be encrypted'
    try:
        _pack(_persistent_ids(state))
    except Exception as error:      # as above
        return f'{type(error).__name__}: {plain(str(error), REASON_BYTES)}'.removesuffix(': ')
    return 'nothing is wrong with it'


def might_refer(record: bytes | None) -> bytes:
    """Return all that an unreadable record may refer to, packed: any 8 bytes in it that form an oid below 2^40."""
    record = record or b''
    if record[:2] == _COMPRESSED:
        with suppress(zlib.error):
            record = zlib.decompress(record[2:])
    return b''.join(dict.fromkeys(match[1] for match in _OID(record)))


def is_wrapped(record: bytes) -> bool:
    """Whether an unreadable record may have been wrapped (encrypted, say) by a storage that is not configured here.

    It does not begin like a pickle, and contains no oid: without that storage its references cannot be known.
    """
    return record[:1] not in _BEGINNINGS and record[:2] != _COMPRESSED and not might_refer(record)


def unpack(refs: bytes) -> tuple[int, ...]:
    """Return the oids that references() packed, as integers. struct.error unless they have 8 bytes each."""
    return struct.unpack(f'>{len(refs) // 8}Q', refs)


def _persistent_ids(state: bytes) -> list[Any]:
    """Return the persistent ids that the two pickles of a record push. Whatever is raised: they are damaged."""
    found: list[Any] = []
    # encoding: a byte string of Python 2 need not be text, least of all an oid.
    unpickler = Unpickler(_Record(state), encoding='bytes')
    unpickler.persistent_load = found.append
    unpickler.noload()
    unpickler.noload()
    return found


def _pack(persistent_ids: list[Any]) -> bytes:
    """Return the oids of ordinary references, joined. ValueError for an id of unknown form."""
    oids: dict[bytes, None] = {}
    for pid in persistent_ids:
        if isinstance(pid, list):
            continue
        oid = pid[0] if isinstance(pid, tuple) else pid
        if isinstance(oid, str):
            oid = oid.encode('latin-1')
        if not isinstance(oid, bytes) or len(oid) != 8:
            raise ValueError(f"not an object's id: {pid!r}")
        oids[oid] = None
    return b''.join(oids)


def class_name(record: bytes | None) -> str:
    """Return the module and class of a record, or '' if unknown. Nothing is imported or run."""
    head = (record or b'')[:HEAD_BYTES]
    found = _GLOBAL.match(head)
    if found:
        return plain(b'.'.join(found.groups()), NAME_BYTES)
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(head):
            if opcode.name == 'GLOBAL':
                return plain(str(argument).replace(' ', '.'), NAME_BYTES)
            if opcode.name in ('STACK_GLOBAL', 'TUPLE', 'TUPLE2') and len(texts) > 1:
                return plain('.'.join(texts[-2:]), NAME_BYTES)
            if opcode.name == 'STOP':
                break
            if isinstance(argument, str):
                texts.append(argument)
    except ValueError:
        return ''       # damaged, or not a pickle
    return ''


def plain(text: bytes | str, limit: int) -> str:
    """Return a text as one line of printable characters, of at most `limit` bytes in UTF-8."""
    if isinstance(text, bytes):
        text = text[:4 * limit].decode('utf-8', 'replace')
    line = ' '.join(''.join([c if c.isprintable() else ' ' for c in text[:4 * limit]]).split())
    if len(line.encode()) <= limit:
        return line
    return line.encode()[:limit - 3].decode('utf-8', 'ignore') + '...'
