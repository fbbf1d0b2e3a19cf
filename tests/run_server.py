"""Starts ``chatlearn`` in processes of their own without importing torch anew for each: a forking server.

Run as a script. Reads one JSON object a line: ``argv``, ``env``, ``cwd``, ``output`` (a file for stdout and stderr) and
``file_limit`` (bytes, or null); answers with the process id and, when asked with ``{"wait": pid}``, with the exit
status as ``subprocess`` has it. Each child leads a session of its own, so that what it leaves behind can be found.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any

PRELOADED = (
    "chatlearn_algorithms.grpo",
    "chatlearn_algorithms.plugin",
    "chatlearn_cli.evaluation",
    "chatlearn_cli.main",
    "chatlearn_cli.progress_bar",
    "chatlearn_cli.run",
    "chatlearn_core.executor.run",
    "chatlearn_data.formats.prompt",
    "chatlearn_data.plugin",
    "chatlearn_data.readers.text",
    "chatlearn_data.shuffled_sampler",
    "chatlearn_fsdp.plugin",
    "chatlearn_fsdp.trainer",
    "chatlearn_hf.family",
    "chatlearn_hf.plugin",
    "chatlearn_local.plugin",
    "chatlearn_local.runtime",
    "chatlearn_observe.plugin",
    "chatlearn_ray.plugin",
    "chatlearn_rewards.plugin",
    "chatlearn_sglang.plugin",
    "chatlearn_sync.checkpoint",
    "chatlearn_sync.direct",
    "chatlearn_sync.plugin",
    "chatlearn_testing.plugin",
    "chatlearn_transformers.generator",
    "chatlearn_transformers.plugin",
    "chatlearn_vllm.plugin",
    "transformers.models.qwen3.modeling_qwen3",
)


def run(order: dict[str, Any]) -> None:
    """In the child: become the command line."""
    os.setsid()
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    # As an interpreter that starts in this environment would have it.
    sys.path[1:1] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    if order["file_limit"] is not None:
        # What exceeds it fails with EFBIG, as a full disk fails with ENOSPC: the kernel refuses the bytes.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"], order["file_limit"]))
    sys.argv = ["chatlearn", *order["argv"]]
    from chatlearn_cli.main import main

    main(order["argv"])


def serve() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection of each run would go through all that was imported
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            run(order)  # leaves with SystemExit, through the interpreter's ordinary shutdown
            sys.exit(0)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    serve()
