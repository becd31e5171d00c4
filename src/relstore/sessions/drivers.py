"""The DB-API modules that can be used: one Driver each, imported only when it is used."""
from relstore.errors import ConfigurationError
from relstore.sessions import mysql_drivers, oracle_drivers, postgresql_drivers, sqlite_driver
from relstore.sessions.driver import Driver

DRIVERS = {driver.name: driver for driver in (
    *sqlite_driver.DRIVERS, *postgresql_drivers.DRIVERS, *mysql_drivers.DRIVERS,
    *oracle_drivers.DRIVERS)}


def find_driver(name: str, *choices: str) -> Driver:
    """Return the driver called `name`, one of `choices`; for 'auto' the first of them that is fit, or else the first.

    ConfigurationError names the choices.
    """
    if name == 'auto':
        return DRIVERS[next((choice for choice in choices if DRIVERS[choice].is_fit()), choices[0])]
    if name not in choices:
        raise ConfigurationError(f'There is no driver {name!r} here; choose one of: {", ".join(choices)}.')
    return DRIVERS[name]
