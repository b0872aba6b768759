"""One file a schema. A revision that has shipped is never edited."""
