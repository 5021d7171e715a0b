"""A platform for SGLang, through its own plug-in interface: plain PyTorch on the CPU.

It selects every layer's native path: no sgl_kernel, no AMX, no Triton launches, no CUDA graphs.
Runs inside the server, in SGLang's venv, and imports nothing of this project. SGLang asks for the
platform while its own modules are half imported, so each import here waits until it is needed.
"""


def activate() -> str:
    """The entry point of group `sglang.srt.platforms`: the platform class's dotted path."""
    return "hybridflow_sglang_cpu.TorchCpuPlatform"


def _make_allocator(size, *, page_size, **options):
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    assert page_size == 1, "this platform serves page_size 1 only"
    return TokenToKVPoolAllocator(size, **options)


def _make_platform() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self):
            return _make_allocator

    return TorchCpuPlatform


def __getattr__(name: str):
    """The class is made when it is asked for: SGLang lists plug-ins before torch is wanted."""
    if name != "TorchCpuPlatform":
        raise AttributeError(name)
    globals()[name] = _make_platform()
    return globals()[name]
