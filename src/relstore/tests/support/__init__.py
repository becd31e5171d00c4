"""What the tests share: backends, servers, faults, clients. No test is here."""
