"""The local engine: a small HTTP rollout server for laptops and fast tests."""
