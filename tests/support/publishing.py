"""The publish check, for any engine: what was trained is served, exactly, and no request is aborted."""

from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM

from gyre_train.loop import train
from tests.support.engines import Background, Engine
from tests.support.training import config, own_logprobs, recorded_run

PROMPT = [5, 17, 80, 3, 44, 291]


def served_gap(engine: Engine, folder: Path, key: str = "k") -> float:
    """Largest difference between the engine's log-probs and those of the weights in a folder."""
    reply = engine.generate(PROMPT, temperature=1.0, max_new_tokens=20, extra_key=key)
    ids = np.array([*PROMPT, *reply["output_ids"]])
    served = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    own = own_logprobs(AutoModelForCausalLM.from_pretrained(folder), ids)[len(PROMPT) - 1 :]
    return float(np.abs(own - np.array(served)).max())


def check_publish(engine: Engine, model: Path, tmp_path: Path) -> None:
    assert served_gap(engine, model) < 1e-4
    run = recorded_run(tmp_path / "r", model)
    in_flight = Background(engine, PROMPT, temperature=1.0, max_new_tokens=400)
    in_flight.wait_for(1)
    done = train(config(model, tmp_path / "out", "--train.lr=3e-2", f"--publish.engines={engine.url}", runs=run))
    assert done.publish_errors == ()
    assert done.checkpoint is not None
    assert engine.get("/model_info").json()["weight_version"] == "run:1" == done.version
    assert served_gap(engine, Path(done.checkpoint), "run:1") < 1e-4
    assert served_gap(engine, model, "run:1") > 1e-2  # the step was large enough for the check to see old weights
    assert len(in_flight.result()["output_ids"]) == 400  # no request was aborted
