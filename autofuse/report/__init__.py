"""Reports of a run's gains, for people (terminal, explain, progress) and for programs (JSON)."""
