"""Real servers for tests: built or fetched with ordinary clients, cached on the machine, started on free ports."""
