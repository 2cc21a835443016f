"""Real cells behind the controller: processes that serve or train, where they run, and how they are told.

`processes` says what a place to run them must do (`local` here, `ray` on several machines), `rollout` and `training`
what each role does, `executions` follows the proxy's executions, and `world` is all of it as the controller's World.
`python -m gyre_sched.cells SETTINGS.toml` runs a controller.
"""
