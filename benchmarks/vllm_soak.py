"""Eight streaming clients against a vLLM server with the plugin, for minutes on end: errors,
memory, MAL by context.

    python benchmarks/vllm_soak.py [MINUTES] [SHARPDRAFT SETTING AS JSON]

Run where vLLM is installed. Clients answer turns of the recorded sessions at mixed lengths; every
eighth request is broken off midway. Prints a line a minute and ends with exit code 1 on an error or
if resident memory has kept growing.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter, smollm2_dir
from sharpdraft.workloads.tasks import recordings

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"
CLIENTS, LONGEST, NEW = 8, 1600, 48


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10
    asked = sys.argv[2] if len(sys.argv) > 2 else "true"
    speculative = {
        "method": "dflash",
        "model": str(built_in_drafter(SMOLLM2)),
        "num_speculative_tokens": 5,
    }
    line = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(smollm2_dir()),
    ]
    line += [
        "--port",
        str(PORT),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-num-seqs",
        str(CLIENTS),
    ]
    line += ["--speculative-config", json.dumps(speculative), "--served-model-name", "smollm2"]
    line += ["--additional-config", json.dumps({"sharpdraft": json.loads(asked)})]
    log = Path("vllm-soak.log")
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2"} | os.environ
    with open(log, "wb") as output:
        server = subprocess.Popen(line, stdout=output, stderr=output, env=environment)
    try:
        failed = soak(server, minutes)
    finally:
        server.terminate()
        server.wait(60)
    sys.exit(failed)


def soak(server: subprocess.Popen[bytes], minutes: float) -> bool:
    while True:
        if server.poll() is not None:
            sys.exit("the server ended; see vllm-soak.log")
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=2)
            break
        except OSError:
            time.sleep(2)
    prompts = [
        r.tokens[: t.answer]
        for r in recordings()
        for t in r.turns
        if t.answer <= LONGEST and t.end - t.answer >= 32
    ]
    done, aborted, errors = [0], [0], []
    end = time.monotonic() + 60 * minutes

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            stop_early = rng.random() < 1 / 8
            try:
                complete(rng.choice(prompts), 5 if stop_early else None)
                (aborted if stop_early else done)[0] += 1
            except Exception as error:
                errors.append(repr(error))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    resident = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(60, max(1, end - time.monotonic())))
        resident.append(memory(server.pid))
        print(
            f"{done[0]} answers, {aborted[0]} aborted, {len(errors)} errors, {resident[-1]:.0f} "
            "MiB resident",
            flush=True,
        )
    print("MAL by context:", mal_by_context())
    # The first minutes fill caches and allocators.
    late = resident[len(resident) // 2 :]
    grown = late[-1] - late[0]
    print(f"memory from the middle to the end: {grown:+.0f} MiB; errors: {errors[:3]}")
    return bool(errors) or grown > 100


def complete(prompt: tuple[int, ...], abort_after: int | None) -> None:
    body = {
        "model": "smollm2",
        "prompt": list(prompt),
        "max_tokens": NEW,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        for number, line in enumerate(response):
            if b'"error"' in line:
                raise RuntimeError(line.decode())
            if abort_after is not None and number >= abort_after:
                return


def memory(pid: int) -> float:
    """Resident MiB of a process and all below it."""
    parents, sizes = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(
                line.split(":", 1) for line in status.read_text().splitlines() if ":" in line
            )
        except OSError:
            continue
        child = int(status.parent.name)
        parents[child] = int(fields["PPid"])
        sizes[child] = int(fields.get("VmRSS", "0 kB").split()[0]) / 1024

    def below(child: int) -> bool:
        while child:
            if child == pid:
                return True
            child = parents.get(child, 0)
        return False

    return sum(size for child, size in sizes.items() if below(child))


def mal_by_context() -> str:
    text = urllib.request.urlopen(f"{URL}/metrics", timeout=10).read().decode()
    counts: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if line.startswith("vllm:spec_decode_num_") and "_by_context_total{" in line:
            kind = line.split("num_")[1].split("_by_context")[0]
            counts.setdefault(line.split('context="')[1].split('"')[0], {})[kind] = float(
                line.rsplit(" ", 1)[1]
            )
    return ", ".join(
        f"{context} {1 + c['accepted_tokens'] / c['drafts']:.2f} ({c['drafts']:.0f} drafts)"
        for context, c in counts.items()
        if c["drafts"]
    )


if __name__ == "__main__":
    main()
