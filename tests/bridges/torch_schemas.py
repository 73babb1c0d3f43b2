"""The operators' schemas, which exported programs and caches hold."""

SCHEMAS = {
    "attention": (
        "cuflash::attention(Tensor q, Tensor k, Tensor v, Tensor? bias=None, "
        "Tensor? sink=None, Tensor? alibi_slopes=None, Tensor? mask=None, "
        "Tensor? segment_ids_q=None, Tensor? segment_ids_k=None, Tensor? "
        "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? "
        "seed_drawn=None, *, float? scale=None, bool causal=False, SymInt? "
        "block_q=None, SymInt? block_k=None, str? precision=None, SymInt? "
        "num_splits=None, bool deterministic=False, SymInt? window_left=None,"
        " SymInt? window_right=None, float? softcap=None, float? "
        "dropout=None, SymInt? seed=None, SymInt? max_seqlen_q=None, SymInt? "
        "max_seqlen_k=None) -> (Tensor out, Tensor lse)"
    ),
    "attention_backward": (
        "cuflash::attention_backward(Tensor? dout, Tensor? dlse, Tensor q, "
        "Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? bias=None, "
        "Tensor? sink=None, Tensor? alibi_slopes=None, Tensor? mask=None, "
        "Tensor? segment_ids_q=None, Tensor? segment_ids_k=None, Tensor? "
        "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? "
        "seed_drawn=None, *, float? scale=None, bool causal=False, SymInt? "
        "block_q=None, SymInt? block_k=None, str? precision=None, SymInt? "
        "num_splits=None, bool deterministic=False, SymInt? window_left=None,"
        " SymInt? window_right=None, float? softcap=None, float? "
        "dropout=None, SymInt? seed=None, SymInt? max_seqlen_q=None, SymInt? "
        "max_seqlen_k=None, bool return_dbias=False, bool return_dsink=False)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
    ),
    "plain_attention": (
        "cuflash::plain_attention(Tensor q, Tensor k, Tensor v, *, float? "
        "scale=None, bool causal=False, bool deterministic=False) -> (Tensor "
        "out, Tensor lse)"
    ),
    "plain_attention_backward": (
        "cuflash::plain_attention_backward(Tensor? dout, Tensor? dlse, Tensor"
        " q, Tensor k, Tensor v, Tensor out, Tensor lse, *, float? "
        "scale=None, bool causal=False, bool deterministic=False) -> (Tensor "
        "dq, Tensor dk, Tensor dv)"
    ),
    "forward_kvcache": (
        "cuflash::forward_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!)? "
        "v_cache=None, Tensor? k_new=None, Tensor? v_new=None, Tensor? "
        "cache_seqlens=None, Tensor? page_table=None, Tensor? "
        "cache_batch_idx=None, Tensor? cache_leftpad=None, Tensor? "
        "cu_seqlens_q=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None,"
        " Tensor? k_scale=None, Tensor? v_scale=None, Tensor? "
        "alibi_slopes=None, Tensor? sink=None, *, SymInt? head_dim_v=None, "
        "SymInt? length=None, SymInt? max_seqlen_q=None, bool "
        "rotary_interleaved=False, float? scale=None, bool causal=False, "
        "SymInt? window_left=None, SymInt? window_right=None, float? "
        "softcap=None, SymInt? num_splits=None) -> (Tensor out, Tensor lse)"
    ),
}
