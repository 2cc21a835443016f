"""PyTorch's private CPU flash operators, on which the segments backend stands. A torch upgrade must pass this first."""

from __future__ import annotations

import torch


def test_signatures_and_merged_backward() -> None:
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    names = [[argument.name for argument in op._schema.arguments] for op in (forward, backward)]
    assert names[0] == ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"]
    assert names[1] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale",
    ]  # fmt: skip

    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    q.requires_grad_()
    scores = (q @ k.mT) * 0.5
    want, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    want.backward(grad)
    with torch.no_grad():
        halves = [slice(0, 2), slice(2, 6)]
        parts = [forward(q, k[:, :, h], v[:, :, h], 0.0, False, scale=0.5) for h in halves]
        merged = sum(out * (part - lse).exp()[..., None] for out, part in parts)
        torch.testing.assert_close(merged, want.detach(), rtol=0, atol=1e-14)
        # Given the merged output and log-sum-exp, a block's backward is exactly its share of the whole gradient.
        shares = [backward(grad, q, k[:, :, h], v[:, :, h], merged, lse, 0.0, False, scale=0.5)[0] for h in halves]
        torch.testing.assert_close(sum(shares), q.grad, rtol=0, atol=1e-14)
