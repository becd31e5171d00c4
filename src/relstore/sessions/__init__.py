"""Sessions: connections to a database, the drivers that make them, and the pool that lends them."""
