"""One file a migration, numbered; a released one is never edited."""
