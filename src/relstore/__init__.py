"""relstore: a ZODB storage that keeps pickles in a relational database."""
from relstore.adapters.postgresql import PostgreSQL
from relstore.adapters.sqlite import SQLite
from relstore.options import Options
from relstore.storage import RelStore

__all__ = ['Options', 'PostgreSQL', 'RelStore', 'SQLite']
