"""Every name that was seen in the wild goes where an expert would put it."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfbook.errors import BadInput
from perfbook.trace.kernels import CATEGORIES, COMMUNICATION, classify, standard_rules, user_rules

SEEN = {
    "all_reduce": """
        ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)
        void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)
        void vllm::cross_device_reduce_2stage<half, 2>
        void sglang::cross_device_reduce_1stage<__nv_bfloat16, 4>
        void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>
        multimem_all_reduce_kernel
        two_shot_all_reduce_kernel_inplace
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1, __nv_bfloat16, 8>
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<1, __nv_bfloat16, 8>
        void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__hip_bfloat16>>
        all_reduce_one_shot_push_kernel
        twoshotAllreduceKernel
        rmsNormLamport
        _C::shm_allreduce
        gloo:all_reduce
        c10d::allreduce_""",
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    "send_recv": """
        ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)
        ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)""",
    "all_to_all": """
        void deep_ep::internode_ll::combine<true, 7168, 10>
        void deep_ep::internode_ll::dispatch<true, false, 7168>
        moe_comm::moeA2ADispatchKernel
        moeAllToAllKernel""",
    "gemm": """
        nvjet_tst_64x16_64x16_4x1_v_bz_TNT
        nvjet_sm100_tst_128x64_64x8_2x1_v_bz_splitK_TNN
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off
        ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x6_tn
        void internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, false, true>
        void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4>
        void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>
        void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_tn_align8>
        void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>
        void machete::prepack_B_kernel<machete::PrepackedLayoutBTemplate>
        void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 4, 16, 4, false>
        gptq_marlin_repack_kernel
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<2112u, 7168u>
        _w8a8_triton_block_scaled_mm
        fused_a_gemm_kernel
        triton_tem_fused_mm_3
        Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256_MI16x16x1_SN_LDSB1
        void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>
        void LLGemm1_kernel<__hip_bfloat16, 4>
        _C::onednn_mm
        aten::mm
        aten::addmm
        aten::linear""",
    "attention": """
        void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false>>
        void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>
        void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>
        kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at
        void flash::FlashAttnFwdCombine<cute::tuple<cute::C<16>>>
        fmhaSm100aKernel_QkvE4m3OBfloat16HQk576HV512HVPerCta256PagedKvDense
        fmhaReductionKernel
        void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>
        void flashinfer::BatchPrefillWithPagedKVCacheKernel<(flashinfer::MaskMode)1>
        kernel_unified_attention_2d
        kernel_unified_attention_3d
        reduce_segments
        void vllm::paged_attention_v2_kernel<unsigned short, unsigned short, 128, 16, 128>
        void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16>
        _fwd_grouped_kernel_stage1
        _fwd_kernel_stage2
        void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8>>
        void flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, float>
        void deep_gemm::sm90_fp8_paged_mqa_logits<32, 128>
        void vllm::topKPerRowDecode<512, true>
        fused_recurrent_gated_delta_rule_fwd_kernel
        _causal_conv1d_update_kernel
        _C::cpu_attention_with_kv_cache""",
    "moe": """
        fused_moe_kernel
        fused_moe_kernel_gptq_awq
        void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8, false>
        bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x8x512u2_s6_et128x8_m128x8x32_rM_TN_schedS_biasM_swiGlu_dynBatch_sm100f
        void moe::dev::routing::routingRenormalize::routingIndicesClusterKernel
        void moe::dev::finalize::finalizeKernel
        void vllm::moe::topkGating<8, 128, 4, 16, 32, int>
        void vllm::moe::moe_align_block_size_kernel<int>
        void vllm::moe::count_and_sort_expert_tokens_kernel<int>
        void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>
        _matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu
        _topk_forward
        _combined_routing_memset
        _combined_routing_compute
        _sum_bitmatrix_rows
        _finalize_matmul_scatter_bf16
        void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16>
        void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__nv_bfloat16>
        void ck::kernel_moe_mxgemm_2lds<ck::GridwiseMoeGemmMX_BPreshuffle>""",
    "norm": """
        void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>
        std::enable_if<(((8) > (0))&&vllm::_typeConvert<c10::BFloat16>::exists)>::type vllm::fused_add_rms_norm_kernel
        void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>
        triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0
        _ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePass
        void aiter::add_rmsnorm_quant_kernel<__hip_bfloat16, __hip_fp8, 256>""",
    "activation": """
        void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>
        triton_poi_fused_mul_silu_1""",
    "rope": "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)",
    "kv_cache": """
        void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>
        void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16>
        store_kvcache_kernel
        _C::cpu_attn_reshape_and_cache
        vllm::unified_kv_cache_update""",
    "cast_copy": """
        void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>
        void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIterator&)>
        void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda>
        triton_poi_fused__to_copy_1
        void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4, 64, 64>
        aten::copy_
        aten::_to_copy""",
    "elementwise": """
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>
        void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul>>
        void at::native::elementwise_kernel<128, 4, at::native::binary_internal::MulFunctor<float>>
        void at::native::elementwise_kernel_manual_unroll<128, 4, at::native::gpu_kernel_impl_nocast>""",
    "quantize": """
        void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>
        void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<c10::BFloat16>
        void per_token_group_quant_8bit_kernel<c10::BFloat16, c10::Float8_e4m3fn, true, false>
        void tensorrt_llm::kernels::quantize_with_block_size<(tensorrt_llm::BlockScaleQuantizationType)0>
        void vllm::cvt_fp16_to_fp4<__nv_bfloat16, false>
        void vllm::silu_mul_cvt_fp16_to_fp4<__nv_bfloat16, false>""",
    "sampling": """
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int>>
        void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>
        void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>
        void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800>
        void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>
        _topk_topp_kernel
        _C::greedy_argmax
        aten::argmax""",
    "memcpy": """
        Memcpy DtoD (Device -> Device)
        __amd_rocclr_copyBuffer
        MEMORY_COPY_DEVICE_TO_HOST""",
    "memset": "Memset (Device)",
    "other": "somebody_elses_kernel",
}  # fmt: skip

PAIRS = [(line.strip(), category) for category, names in SEEN.items() for line in names.strip().splitlines()]


@pytest.mark.parametrize(("name", "category"), PAIRS, ids=[f"{c}-{i}" for i, (_, c) in enumerate(PAIRS)])
def test_names_seen_in_the_wild(name: str, category: str) -> None:
    assert classify(name) == category


def test_each_rule_catches_its_own_example() -> None:
    for rule in standard_rules():
        first = next(r for r in standard_rules() if r.pattern.search(rule.example))
        assert first is rule, f"{rule.example!r} is caught by {first.pattern.pattern!r}"
        assert rule.source


def test_every_category_but_other_has_a_rule() -> None:
    assert {r.category for r in standard_rules()} == set(CATEGORIES) - {"other"}
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"} == COMMUNICATION


def test_user_rules_come_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[rule]]\ncategory = "moe"\npattern = "somebody"\n[[rule]]\ncategory="norm"\npattern="gemm"\n')
    rules = user_rules(file)
    assert classify("somebody_elses_kernel", rules) == "moe"
    assert classify("ampere_sgemm_128x64_nn", rules) == "norm"
    assert classify("ampere_sgemm_128x64_nn") == "gemm"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[rule]]\ncategory = "speed"\npattern = "x"\n', "no category 'speed'"),
        ('[[rule]]\ncategory = "moe"\npattern = "("\n', "no regular expression"),
        ('[[rule]]\ncategory = "moe"\n', "needs a category and a pattern"),
        ("[[rule\n", "not valid TOML"),
    ],
)
def test_user_rules_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=says) as caught:
        user_rules(file)
    assert "mine.toml" in str(caught.value) and "\n" not in str(caught.value)
