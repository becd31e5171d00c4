"""A wrapper that stores each record in hexadecimal."""
from ZODB.tests.hexstorage import HexStorage


class MVCCHexStorage(HexStorage):
    """ZODB's, for storages whose instances have a view."""

    def new_instance(self):
        return type(self)(self.base.new_instance())

    def load(self, oid, version=''):
        data, tid = self.base.load(oid)
        return self.unhex(data), tid

    @staticmethod
    def unhex(data):
        assert data.startswith(b'.h')
        return bytes.fromhex(data[2:].decode('ascii'))
