"""Which models rollout servers run. Imports no torch."""

# Those whose parameters in a server `hybridflow.weight_sync.layout` knows: published weights are
# proven by a digest of the server's own tensors.
SERVED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
