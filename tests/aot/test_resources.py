"""What compilers print of kernels and launches is read right; needs no compiler."""

import pytest

from tests.aot.resources import (
    Kernel,
    base_name,
    mosaic_kernels,
    pallas_calls,
    parse_command_buffers,
    parse_ptxas,
)

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode__1' for 'sm_90a'
ptxas info    : Function properties for paged_decode__1
    96 bytes stack frame, 128 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 96 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 2.627 ms
ptxas info    : Compiling entry function 'join' for 'sm_90a'
ptxas info    : Function properties for join
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def test_registers_spills_and_shared_memory_are_read_for_each_kernel():
    assert parse_ptxas(PTXAS) == [
        Kernel(name="paged_decode__1", registers=255, spill_bytes=224, shared_bytes=1024),
        Kernel(name="join", registers=40, spill_bytes=0, shared_bytes=0),
    ]


def test_kernel_without_numbers_is_an_error():
    with pytest.raises(ValueError, match="nothing of registers"):
        parse_ptxas("ptxas info    : Compiling entry function 'a' for 'sm_80'\n")


def test_mosaic_kernels_have_the_largest_scratch_and_its_barriers():
    log = (
        "Resources(smem_scratch_bytes=16384, tmem_scratch_cols=0, barrier_counts=Counter({"
        "Barrier(arrival_count=1, num_barriers=3, orders_tensor_core=False): 2}), x={})\n"
        "Resources(smem_scratch_bytes=64, tmem_scratch_cols=0, barrier_counts=Counter(), x={})\n"
        "ptxas info    : Compiling entry function 'decode_mosaic_gpu_kernel' for 'sm_90a'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 36 registers, used 2 barriers, 1 bytes smem\n"
    )
    (kernel,) = mosaic_kernels(log)
    assert (kernel.registers, kernel.shared_bytes) == (36, 16384 + 3 * 2 * 8 + 1)


def test_kernels_of_one_name_share_it():
    assert base_name("paged_prefill__1") == base_name("paged_prefill") == "paged_prefill"


THUNKS = """000: kCommandBuffer [source       | next=013 (1)] 
    001: kCopy         [source       | sink        ] kCopy
    002: kCustomKernel [source       | next=003 (1)] paged_decode grid: [1, 1, 1] threads: [128, 1, 1]  shared_memory: 16384 bytes
    003: kConditional  [prev=024 (1) | next=029 (1)]       
      false_branch:
        004: kCustomKernel [source | sink] fusion_1 grid: [8, 1, 1] threads: [256, 1, 1]  shared_memory: 0 bytes
005: kWhile         [prev=000 (1) | next=000 (1)]   
condition:
    006: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source | sink] 
        007: kCustomKernel [source | sink] add grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
008: kCustomCall   [source       | next=002 (1)] kCustomCall
"""  # noqa: E501, W291


def test_launches_are_inside_or_outside_of_graphs():
    buffers = parse_command_buffers(THUNKS)
    assert buffers.count == 2
    assert buffers.inside == (
        "Copy kCopy",
        "CustomKernel paged_decode",
        "CustomKernel fusion_1",
        "CustomKernel add",
    )
    assert buffers.outside == ("CustomKernel less", "CustomCall kCustomCall")
    assert buffers.loops == ("Conditional", "While")


def test_pallas_calls_are_told_from_other_custom_calls():
    call = '  %a = f32[4]{0} custom-call(%b), custom_call_target="%s", metadata={op_name="%s"}\n'
    hlo = "".join(
        call.replace("%s", target, 1).replace("%s", name, 1)
        for target, name in (
            ("__gpu$xla.gpu.triton", "jit(step)/cond/paged_decode/pallas_call"),
            ("mosaic_gpu_v2", "jit(f)/paged_prefill/mpmd_map"),
            ("__cublas$gemm", "jit(f)/dot_general"),
        )
    )
    assert pallas_calls(hlo) == ["paged_decode", "paged_prefill"]
