"""Arrays for PostgreSQL: as text, and in the binary form that the server need not parse."""
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

# Binary arrays: the type's oid, the format of an element (its length, then its value), and that length. A text is an
# md5. NULL is only a length.
ELEMENTS = {'bigint': (20, 'iq', 8), 'integer': (23, 'ii', 4), 'text': (25, 'i32s', 32)}
NULL = struct.pack('>i', -1)
KEPT = 1000             # longer arrays do not have their formats cached


def known(values: list[Any]) -> list[Any]:
    """Return a column, or [] if it is NULL throughout: the server takes missing elements for NULL."""
    return values if values.count(None) < len(values) else []


def starts(values: Sequence[bytes]) -> list[int]:
    """Return the positions at which the values begin when they are joined."""
    return list(accumulate(map(len, values[:-1]), initial=0)) if values else []


def array(kind: str, values: Sequence[Any]) -> str:
    """Return numbers, md5s and None as an array. Not one by one, because a commit of many objects has many."""
    return '{' + ','.join(map(str, values)).replace('None', 'NULL') + '}'


def binary_array(kind: str, values: Sequence[Any]) -> bytes:
    """Return the same in binary form: a header, then the length and the value of each element."""
    number, form, size = ELEMENTS[kind]
    # Number of dimensions; is there a NULL; the type; how many elements, and the index of the first.
    if not values:
        return struct.pack('>iii', 0, 0, number)
    header = 1, None in values, number, len(values), 1
    if kind == 'text':
        values = [value and value.encode() for value in values]
    if header[1]:
        element = struct.Struct(f'>{form}')
        return struct.pack('>iiiii', *header) + b''.join(
            [NULL if value is None else element.pack(size, value) for value in values])
    # All in one call takes half as long as one for each element.
    elements = [size] * (2 * len(values))
    elements[1::2] = values
    form = f'>iiiii{form * len(values)}'
    if len(values) > KEPT:      # struct.pack caches a hundred formats, at some 60 bytes an element
        return struct.Struct(form).pack(*header, *elements)
    return struct.pack(form, *header, *elements)
