"""The crash test: what is left of a commit that all could see, when the server dies before its log is on disk?

    python -m relstore.tests.crash --minutes 10        (or make crash)

With group commit others see a commit a moment before it is durable.  What they saw may have been a phantom: the server
is killed, and after the recovery it never was.  The epoch, which is another one then, keeps phantoms from doing harm.
All caches begin anew with it, each in its own way:

process     a poll, and a load that misses, bring the epoch; with another one the cache is dropped
memcached   the epoch is part of the keys
file        the epoch is in its header
vote        carries the epoch of what was read, and the server compares

A process that asks nobody, because the commit counter in memcached says that nothing was committed, does not go on with
a phantom either.  It remembers the counter's value of before the poll that showed the phantom, and believes it only
while it is the same, and balanced.  The committer says "begun" before its commit can be seen, and "done" when that is
on disk, or when it is certain that it never will be.  So either the value did not count its "begun", and is never read
again; or it did, and was not balanced unless the commit was durable, and so no phantom.  A committer that is killed too
says "done" never: the counter stays unbalanced, and everybody asks.  (One that cannot reach memcached is not counted,
as ever; but the first process to see the new epoch deletes the counter.)

`window` holds the moment open, for tests that must meet it.  A storm (`storm`, `clients`) meets it by chance: writers
and readers in processes of their own on a server that is killed again and again.  Each process writes down what it was
told and what it was served, and when; `ledger` judges all that in the end.
"""
