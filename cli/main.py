"""Entry point of the `millrace` command."""

from __future__ import annotations

import typer

from cli import (
    admin_key,
    audit,
    bench,
    chat,
    down,
    evaluate,
    key,
    price,
    release,
    rollout,
    status,
    tenant,
    up,
    upgrade,
    usage,
)

app = typer.Typer(
    name="millrace",
    help="Multi-tenant LLM serving: bounded work in, tokens out, one bill.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(up.up)
app.command()(down.down)
app.command()(status.status)
app.command()(upgrade.upgrade)
app.command()(chat.chat)
app.command(name="eval")(evaluate.evaluate)
app.command()(bench.bench)
app.add_typer(usage.app, name="usage", help="Read the ledger.")
app.add_typer(price.app, name="price", help="Set and list what tokens cost.")
app.add_typer(key.app, name="key", help="Create, change, list, rotate and revoke API keys.")
app.add_typer(tenant.app, name="tenant", help="Create, change and list tenants and projects.")
app.add_typer(admin_key.app, name="admin-key", help="Create, list and revoke keys of administrators.")
app.add_typer(rollout.app, name="rollout", help="Roll a new version out by steps, watch it, roll it back.")
app.add_typer(release.app, name="release", help="Make, show, verify and compare manifests of releases.")
app.add_typer(audit.app, name="audit", help="See who changed what.")


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
