"""Which models rollout servers run. Imports no torch."""

# Those whose parameters in a real SGLang `hybridflow.weight_sync.layout` was proven to know: a
# server that loaded a checkpoint has the digest that the layout makes of it, on one rank, on two,
# and with experts spread over two (`tests/rollout/test_layout_sglang.py`). Published weights are
# proven by such digests.
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

# Those among them that SGLang loads on a CPU, but cannot run there: its first request ends the
# server.
GPU_ONLY = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen2MoeForCausalLM")

# Those to which SGLang gives an output layer of their own whatever `tie_word_embeddings` says:
# where a checkpoint ties the two, and so holds one tensor, that layer would stay as it began.
NEVER_TIED = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")

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
