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
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from sharpdraft.drafters.registry import num_drafts
from sharpdraft.hub.smollm2 import SMOLLM2, built_in_drafter, smollm2_dir
from sharpdraft.lab.backends.vllm import speculative_config
from sharpdraft.workloads.tasks import recordings

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"
CLIENTS, LONGEST, NEW = 8, 1600, 48


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10
    asked = sys.argv[2] if len(sys.argv) > 2 else "true"
    drafter = built_in_drafter(SMOLLM2)
    assert drafter is not None
    speculative = speculative_config(drafter, num_drafts(drafter))
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
            httpx.get(f"{URL}/health", timeout=2).raise_for_status()
            break
        except httpx.HTTPError:
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
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=300) as response:
        for number, line in enumerate(response.iter_lines()):
            if response.is_error or '"error"' in line:
                raise RuntimeError(line)
            if abort_after is not None and number >= abort_after:
                return


def memory(pid: int) -> float:
    """Resident MiB of a process and all below it."""
    above = psutil.Process(pid)
    resident = 0
    for process in (above, *above.children(recursive=True)):
        try:
            resident += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return resident / 2**20


def mal_by_context() -> str:
    counts: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{URL}/metrics").text):
        for sample in family.samples:
            kind = sample.name.removeprefix("vllm:spec_decode_num_")
            if kind != sample.name and kind.endswith("_by_context_total"):
                own = counts.setdefault(sample.labels["context"], {})
                own[kind.removesuffix("_by_context_total")] = sample.value
    return ", ".join(
        f"{context} {1 + c['accepted_tokens'] / c['drafts']:.2f} ({c['drafts']:.0f} drafts)"
        for context, c in counts.items()
        if c["drafts"]
    )


if __name__ == "__main__":
    main()
