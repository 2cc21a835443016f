"""The only folder that imports megatron. Its notices about absent GPU packages are kept from users' terminals."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
