"""The soak test: does anything give way when relstore works for hours, and its servers fall over meanwhile?

    python -m relstore.tests.soak --minutes 60 --adapter postgresql        (or make soak)

Several processes, each of several threads with ordinary ZODB connections, read and write a history-preserving and a
history-free database on one server of our own, which is restarted and killed at random; so is one of the processes.
With --memcached they share one, which is disturbed as well: no transaction may fail then, and a commit may be seen late
by poll-interval where its process could not reach the memcached, as the documentation says.
Every view is checked all the time (world.py says for what), and what was acknowledged must be there in the end.

Beside that everything is sampled that could grow: memory, sessions, transactions left open, dead rows, the size of
the database. The last third of the run is compared with the second (verdict.py). The exit status is 0 if all held.

RELSTORE_TEST_POSTGRESQL and RELSTORE_TEST_MYSQL name a staging server to run on; there nothing is killed.
"""
