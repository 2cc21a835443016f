"""The learning rate by hand."""

import pytest

from gyre_train.config import TrainConfig
from gyre_train.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2]),
    ],
)
def test_warm_up_then_decay(schedule: str, want: list[float]) -> None:
    config = TrainConfig(
        lr=1.0, warmup_steps=2, steps=6, schedule=schedule, min_lr=0.2 if schedule != "constant" else 0
    )
    assert [learning_rate(config, step) for step in range(1, 7)] == pytest.approx(want, abs=1e-6)
    assert learning_rate(config, 9) == pytest.approx(want[-1])
