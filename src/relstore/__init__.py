"""relstore: a ZODB storage that keeps pickles in a relational database."""
from relstore.adapters.addresses import MySQL, Oracle, PostgreSQL, SQLite
from relstore.options import Options
from relstore.storage import RelStore

__all__ = ['MySQL', 'Options', 'Oracle', 'PostgreSQL', 'RelStore', 'SQLite']
