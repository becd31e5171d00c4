"""The statements of a text of SQL, and values for their parameters."""
import re

from relstore.sessions.statement import PARAMETER, split

parts = split


def explains(statement):
    return statement.split()[0] in ('SELECT', 'INSERT', 'UPDATE', 'DELETE', 'WITH')


def numbered(text):
    """Return a text with `$name` for each parameter as PostgreSQL prepares it, and the names of $1, $2 and so on."""
    names = list(dict.fromkeys(PARAMETER.findall(text)))
    return re.sub(PARAMETER, lambda name: f'${names.index(name[1]) + 1}', text), names
