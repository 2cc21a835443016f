"""A small inference engine over a Hugging Face causal LM, with SGLang's HTTP contract.

For laptops, tests and the demo. Real SGLang is the reference: where the two differ, this one is wrong. Importing this
package loads no torch.
"""

from __future__ import annotations

__all__: list[str] = []
