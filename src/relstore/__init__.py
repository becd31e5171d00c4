"""relstore: a ZODB storage that keeps pickles in a relational database."""
from relstore.adapters.mysql import MySQL
from relstore.adapters.postgresql import PostgreSQL
from relstore.adapters.sqlite import SQLite
from relstore.options import Options
from relstore.storage import RelStore

__all__ = ['MySQL', 'Options', 'PostgreSQL', 'RelStore', 'SQLite']
