"""The usage service: the exactly-once token ledger, tenants and keys, and the exports.

It reads `mr:{<pool tag>}:usage`, writes each event once into the ledger, and then tells gateways which request ids are
durable by `ZADD mr:{<pool tag>}:committed <unix ms> <request_id>` (kept for one hour), so that their outboxes may
forget them. A dead letter is durable too and is published the same way. Truth is the database; Redis holds copies.
"""
