"""The statements of a text of SQL."""
import re


def parts(text):
    """The statements of a text, one by one."""
    return [part for part in re.split(r';\s*\n', text) if part.strip()]


def explains(statement):
    return statement.split()[0] in ('SELECT', 'INSERT', 'UPDATE', 'DELETE', 'WITH')
