"""Sessions: connections to a database, which module makes them, and the pool that lends them."""
