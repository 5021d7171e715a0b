"""The training engine on megatron.core: packs, schedules, optimizer, checkpoints."""
