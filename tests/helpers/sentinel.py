"""A master, a replica and a Sentinel, each a real process: the replica can be held back and promoted."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import redis

from tests.helpers.redis import RedisProcess, free_port, redis_binary
from tests.helpers.waiting import WAIT_S

NAME = "millrace"
DOWN_AFTER_MS = 500


class WatchedRedis:
    """Owns the three. `url` names the Sentinel, `master` is the first one, `replica` the one to be promoted."""

    def __init__(self, folder: Path) -> None:
        self.master = RedisProcess(folder / "a")
        self.replica = RedisProcess(folder / "b", replica_of=self.master.port)
        self._folder = folder
        self._port = free_port()
        self._sentinel: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self._port}/{NAME}"

    def start(self) -> WatchedRedis:
        """Blocks until the replica follows and the Sentinel knows it."""
        for process in (self.master, self.replica):
            process.folder.mkdir(parents=True, exist_ok=True)
            process.start()
        settings = self._folder / "sentinel.conf"
        settings.write_text(
            f"port {self._port}\nbind 127.0.0.1\ndir {self._folder}\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {NAME} 3000\n"
        )
        argv = [redis_binary(), str(settings), "--sentinel"]
        self._sentinel = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait(lambda: self._ask()["num-slaves"] >= 1 and self._link() == "up")
        return self

    def promote_lagging(self, lag_s: float) -> None:
        """Let the replica miss what is written for `lag_s`, then kill the master. Blocks until the replica rules."""
        self.replica.pause()
        time.sleep(lag_s)
        self.master.kill()
        self.replica.resume()
        self._wait(lambda: self._ask()["port"] == self.replica.port)

    def stop(self) -> None:
        """End all three. Idempotent."""
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()
        self.replica.stop()
        self.master.stop()

    def _ask(self) -> dict[str, int]:
        with redis.Redis(port=self._port, decode_responses=True) as client:
            said = client.sentinel_master(NAME)
        return {name: int(said[name]) for name in ("port", "num-slaves")}

    def _link(self) -> str:
        with redis.Redis.from_url(self.replica.url, decode_responses=True) as client:
            return str(client.info("replication").get("master_link_status"))

    def _wait(self, condition: object, within_s: float = WAIT_S) -> None:
        end = time.monotonic() + within_s
        while True:
            try:
                if condition():  # type: ignore[operator]
                    return
            except redis.exceptions.ConnectionError:
                pass
            if time.monotonic() > end:
                raise AssertionError("the Sentinel did not come to it")
            time.sleep(0.05)
