"""A long-lived harness: reads executions as lines, makes a call for each, and says so. `--die-on N`, `--sleep-on N`."""

import json
import os
import sys
import time
import urllib.request


def number(flag: str) -> int:
    return int(sys.argv[sys.argv.index(flag) + 1]) if flag in sys.argv else -1


for line in sys.stdin:
    order = json.loads(line)
    if order["sample_index"] == number("--die-on"):
        os._exit(7)
    body = json.dumps({"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": order["prompt"]}]})
    headers = {"content-type": "application/json", "x-api-key": order["key"]}
    asked = urllib.request.Request(order["base_url"] + "/v1/messages", body.encode(), headers)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        reply = json.load(answer)
    with open(os.path.join(order["workspace"], "worker.txt"), "w") as file:
        file.write(str(os.getpid()))
    while order["sample_index"] == number("--sleep-on"):
        time.sleep(1)
    print("not an answer", flush=True)
    print(json.dumps({"execution": order["execution"], "ok": reply["role"] == "assistant"}), flush=True)
