"""The body of a child process: reads one request at a time from stdin, has a script handle it, answers on stdout.

Each message is 4 bytes of length (big endian) and a JSON object. A request that uses up its CPU time dies by SIGPROF.
Imports nothing of the platform; started by child_process only: `child_main.py <script> <CPU seconds>`.
"""

from __future__ import annotations

import json
import resource
import runpy
import signal
import struct
import sys

_MEMORY_BYTES = 1024 * 1024 * 1024


def main() -> int:
    """Serve until stdin ends."""
    answer = runpy.run_path(sys.argv[1])["answer"]
    cpu_seconds = float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(4):
        request = json.loads(source.read(struct.unpack(">I", header)[0]))
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answered = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        payload = json.dumps(answered).encode()
        sink.write(struct.pack(">I", len(payload)) + payload)
        sink.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
