"""Modules that run inside a rollout server's process, SGLang's included: no imports of ours."""
