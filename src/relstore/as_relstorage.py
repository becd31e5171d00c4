"""Import this, and `%import relstorage` in a configuration file means relstore.

For files that a program writes: plone.recipe.zope2instance imports relstorage where it is told `rel-storage`. Its
option `initialization` may be `import relstore.as_relstorage`. Where there is no such option, this line in a file
`as_relstorage.pth` in site-packages does it for all programs of that Python.
"""
import importlib.util
import os.path
import sys
from importlib.resources import files
from types import ModuleType


class _Loader:
    """Reads the files that ZConfig looks for in the package. There is nothing to import."""

    def get_data(self, path: str) -> bytes:
        return files('relstore').joinpath(os.path.basename(path)).read_bytes()


def _stand_in() -> ModuleType:
    if importlib.util.find_spec('relstorage') is not None:
        raise ImportError('RelStorage is installed, so %import relstorage means that; uninstall it, or write '
                          '%import relstore.')
    package = ModuleType('relstorage', 'Stands for relstore in configuration files: see relstore.as_relstorage.')
    package.__path__ = [__file__]       # no directory, so nothing is found in it
    package.__loader__ = _Loader()    # type: ignore[assignment]  # get_data is all that is asked for
    return package


sys.modules['relstorage'] = _stand_in()
