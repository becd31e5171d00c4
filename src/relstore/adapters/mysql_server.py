"""Server: what relstore has to know about a server of MySQL or MariaDB."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relstore.errors import ConfigurationError

if TYPE_CHECKING:
    from relstore.adapters.statements import Statements
    from relstore.sessions.session import Session

OLDEST_MYSQL, OLDEST_MARIADB = (8, 0), (10, 6)      # SKIP LOCKED; and JSON_TABLE came with them
SMALLEST_PACKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Server:
    """A server as it is; by default, as one usually is.

    variables: the names of its variables, as far as they are known. packet: the largest message, in bytes.
    """
    product: str = 'MySQL'          # or 'MariaDB'
    has_memory: bool = True         # Does it have tables that a restart empties?
    in_cluster: bool = False        # May other servers write to the same database?
    # Does it log whole rows if one column changes? For replicas, or for the other nodes of a cluster.
    logs_whole_rows: bool = False
    variables: Collection[str] = ()
    packet: int = SMALLEST_PACKET_BYTES


def look_at(session: Session, sql: Statements, read_only: bool) -> Server:
    """Return the server of a session, or refuse it: ConfigurationError."""
    variables: dict[str, Any] = dict(session.all(sql.server))
    version = variables['version']
    product, oldest = ('MariaDB', OLDEST_MARIADB) if 'MariaDB' in version else ('MySQL', OLDEST_MYSQL)
    if tuple(map(int, version.split('.')[:2])) < oldest:
        raise ConfigurationError(f'The server is {product} {version}; relstore needs {oldest[0]}.{oldest[1]} or '
                                 'newer.')
    enforced = variables.get('enforce_storage_engine')
    if enforced and enforced.upper() != 'INNODB' and not read_only:
        raise ConfigurationError(f'enforce_storage_engine of the {product} server is {enforced}; set it to InnoDB, or '
                                 'unset it.')
    if session.one(sql.has_innodb) is None:
        raise ConfigurationError(f'The {product} server has no InnoDB; start it with InnoDB enabled.')
    packet = int(variables['max_allowed_packet'])
    if packet < SMALLEST_PACKET_BYTES:
        raise ConfigurationError(f'max_allowed_packet of the {product} server is {packet:,}; set it to '
                                 f'{SMALLEST_PACKET_BYTES:,} at least, and to more than the largest object.')
    if not read_only:
        _refuse_to_write(product, variables)
    in_group = bool(variables.get('group_replication_group_name'))
    has_memory = not ('MEMORY' in variables.get('disabled_storage_engines', '').upper() or in_group or enforced)
    in_cluster = variables.get('wsrep_on') == 'ON' or (
        in_group and variables['group_replication_single_primary_mode'] == 'OFF')
    logs_whole_rows = variables.get('binlog_row_image') == 'FULL' and (in_cluster or variables['log_bin'] == 'ON')
    return Server(product, has_memory, in_cluster, logs_whole_rows, frozenset(variables), packet)


def _refuse_to_write(product: str, variables: dict[str, Any]) -> None:
    if {variables['read_only'], variables['innodb_read_only']} != {'OFF'}:      # MariaDB 12 knows several ways
        raise ConfigurationError(f'The {product} server is read-only; connect to one that may be written, or set '
                                 'read-only true.')
    if variables['log_bin'] == 'ON' and variables['binlog_format'] == 'STATEMENT':
        raise ConfigurationError(f'binlog_format of the {product} server is STATEMENT, which cannot log what relstore '
                                 'does; set it to ROW or MIXED.')
