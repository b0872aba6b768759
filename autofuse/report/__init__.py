"""What a run gained, for people (terminal, explain, progress) and for programs (JSON)."""
