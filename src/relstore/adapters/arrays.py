"""PostgreSQL's arrays: as text, and in the binary form that the server need not parse."""
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

# Of binary arrays: the type's oid, the form of an element, which is its length and itself, and that length; a text is
# an md5. NULL is a length alone.
ELEMENTS = {'bigint': (20, 'iq', 8), 'integer': (23, 'ii', 4), 'text': (25, 'i32s', 32)}
NULL = struct.pack('>i', -1)
KEPT = 1000             # elements: the longest whose format may be kept


def known(values: list[Any]) -> list[Any]:
    """Return the column, or nothing where it is NULL throughout: so is what an array lacks beside a longer one."""
    return values if values.count(None) < len(values) else []


def starts(values: Sequence[bytes]) -> list[int]:
    """Return where each begins when they are joined."""
    return list(accumulate(map(len, values[:-1]), initial=0)) if values else []


def array(kind: str, values: Sequence[Any]) -> str:
    """Return numbers, md5s and None as an array; all at once, for a commit of many objects makes many."""
    return '{' + ','.join(map(str, values)).replace('None', 'NULL') + '}'


def binary_array(kind: str, values: Sequence[Any]) -> bytes:
    """Return the same in the form that the server need not parse: a header, then the length of each, and itself."""
    number, form, size = ELEMENTS[kind]
    # Dimensions; is there a NULL; the type; how many, and what the first is called.
    if not values:
        return struct.pack('>iii', 0, 0, number)
    header = 1, None in values, number, len(values), 1
    if kind == 'text':
        values = [value and value.encode() for value in values]
    if header[1]:
        element = struct.Struct(f'>{form}')
        return struct.pack('>iiiii', *header) + b''.join(
            [NULL if value is None else element.pack(size, value) for value in values])
    # All in one call, because a commit of many objects makes many: half as long as an element at a time.
    elements = [size] * (2 * len(values))
    elements[1::2] = values
    form = f'>iiiii{form * len(values)}'
    if len(values) > KEPT:      # struct.pack keeps what it makes of a hundred formats, some 60 bytes an element
        return struct.Struct(form).pack(*header, *elements)
    return struct.pack(form, *header, *elements)
