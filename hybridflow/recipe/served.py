"""Which models rollout servers run. Imports no torch."""

# Those whose parameters in a real SGLang `hybridflow.weight_sync.layout` was proven to know: a
# server that loaded a checkpoint has the digest that the layout makes of it, on one rank, on two,
# and with experts spread over two (`tests/rollout/test_layout_sglang.py`). Published weights are
# proven by such digests. On a CPU SGLang loads DeepSeek and Qwen2-MoE, but cannot run them: there
# the server ends at its first request.
SERVED = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm4ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

# Those whose forward pass the local engine has.
LOCAL = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
