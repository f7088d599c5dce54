"""Alembic's entry: runs the migrations on the connection that `store.open_store` hands over."""

from __future__ import annotations

from alembic import context

from services.usage import schema

context.configure(connection=context.config.attributes["connection"], target_metadata=schema.metadata)
with context.begin_transaction():
    context.run_migrations()
