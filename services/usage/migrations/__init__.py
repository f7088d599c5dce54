"""Schema migrations, run by `store.open_store` at start under a lock."""
