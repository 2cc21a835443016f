"""The smallest harness: mini_harness.py NUM_CALLS [--sleep]. One conversation, plain urllib, no client library."""

import json
import os
import sys
import time
import urllib.request

messages = []
for turn in range(int(sys.argv[1])):
    messages.append({"role": "user", "content": f"turn {turn}"})
    body = json.dumps({"model": "m", "max_tokens": 16, "messages": messages}).encode()
    headers = {"content-type": "application/json", "x-api-key": os.environ["GYRE_KEY"]}
    asked = urllib.request.Request(os.environ["GYRE_BASE_URL"] + "/v1/messages", body, headers)
    with urllib.request.urlopen(asked, timeout=600) as answer:
        reply = json.load(answer)
    messages.append({"role": "assistant", "content": reply["content"]})
    with open(f"turn-{turn}.txt", "w") as file:
        file.write(f"{turn}\n")
while "--sleep" in sys.argv:
    time.sleep(1)
