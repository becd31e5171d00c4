"""Settings that the owner of a MySQL or MariaDB server may have changed, and that our sessions set to the usual values.

DEFAULT would not do: it is the value that the owner has set. No right is needed to set these. Which of them exist
depends on the product and its version; the server is asked for their names once.
"""
from collections.abc import Collection

SETTINGS = {
    # Refuses to change a table without a key.
    'sql_safe_updates': '0',
    # MariaDB 10.11 forgets ORDER BY where it buffers, so that a LIMIT leaves out what comes first.
    'sql_buffer_result': '0',
    # Of a column that counts, NULL would be the row that was inserted last.
    'sql_auto_is_null': '0',
    # Rows that nobody would ever remove; and with the second off, too, MariaDB locks a table that is empty for whoever
    # is the first to insert into it.
    'foreign_key_checks': '1', 'unique_checks': '1', 'check_constraint_checks': '1',
    # A list of oids would become a join, or a scan of the table: rows would be locked in any order, or all of them.
    'in_predicate_conversion_threshold': '0', 'range_optimizer_max_mem_size': '0',
    'optimizer_max_sel_arg_weight': '0', 'optimizer_max_sel_args': '4294967295',
    # Of a row that was changed since the statement began, the new value is what is to be locked: no error.
    'innodb_snapshot_isolation': 'OFF',
    # What has voted is not to fail, whichever of its statements takes long.
    'max_statement_time': '0', 'max_execution_time': '0',
    # Answers of before.
    'query_cache_type': 'OFF', 'wsrep_dirty_reads': 'OFF',
}


def settings(there: Collection[str]) -> str:
    """Return what follows in a SET SESSION. there: the names of the variables that the server has."""
    return ''.join(f', {name} = {value}' for name, value in SETTINGS.items() if name in there)
